"""What the tests of memory on the host need of the system."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

GLIBC = "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", {})
_TOLD = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# Where the kernel maps 2 MB at once by itself, pages tell nothing.
_COUNTS = not HUGE_PAGES.exists() or "[always]" not in HUGE_PAGES.read_text()
NEEDS_GLIBC = pytest.mark.skipif(
    not GLIBC or not _COUNTS or any(name in os.environ for name in _TOLD),
    reason="for glibc's allocator as it comes, and pages of the usual size",
)
