"""Programs and libraries that some tests need. Where CI promises them, their absence is a failure, never a skip."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest

REQUIRED = "PORTABLE_FLASH_REQUIRE_TOOLS"  # set to 1 by .ci/run, which installs them


def missing(what: str) -> NoReturn:
    """Skip the test; fail it where the tools are promised."""
    if os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{what} is missing, and {REQUIRED}=1 promises it", pytrace=False)
    pytest.skip(f"{what} is missing")


def require(*names: str) -> str:
    """Path of the first of these programs that is on PATH."""
    for name in names:
        found = shutil.which(name)
        if found:
            return found
    missing(" or ".join(names))


def require_library(*names: str) -> str:
    """The first of these shared libraries that the dynamic linker can load here (each is loaded to find out)."""
    for name in names:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    missing(" or ".join(names))


def require_module(name: str) -> None:
    """A Python package, looked for without importing it."""
    if importlib.util.find_spec(name) is None:
        missing(f"the Python package {name}")


@contextmanager
def chromium() -> Iterator[Any]:
    """A selenium driver of a browser without a window, which logs its console and its requests."""
    browser_path, driver_path = require("chromium", "chromium-browser", "google-chrome"), require("chromedriver")
    require_module("selenium")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = browser_path
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_path))
    try:
        yield driver
    finally:
        driver.quit()
