"""Makes the helpers of this folder (`calls`, `public_reports_adapter`) importable from the tests below it."""
