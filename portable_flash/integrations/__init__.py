"""Adapters that let other libraries call portable_flash. Each is imported by name and imports its library only then."""
