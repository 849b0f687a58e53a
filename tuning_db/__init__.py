"""Facts and tilings by GPU model: one YAML file each (see portable_flash.tuning)."""
