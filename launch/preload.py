"""Find the library of --preload: an allocator or OpenMP runtime, by short name or by path."""

import glob
import os
import sys
from collections.abc import Mapping

from numadist.errors import PlacementError

# Short name -> file names in order of preference, and the Debian package that brings it.
LIBRARIES = {
    "tcmalloc": (("libtcmalloc_minimal.so*", "libtcmalloc.so*"), "libtcmalloc-minimal4"),
    "jemalloc": (("libjemalloc.so*",), "libjemalloc2"),
    "iomp5": (("libiomp5.so", "libomp.so*"), "libomp5, or pip install intel-openmp"),
}
FOLDERS = ("/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")


def find_library(asked: str, environ: Mapping[str, str]) -> str:
    """Absolute path of a library to preload. Raises: PlacementError naming where it was looked for."""
    if asked not in LIBRARIES:
        if not os.path.isfile(asked):
            raise PlacementError(f"--preload {asked}: no such file; short names are {', '.join(LIBRARIES)}")
        return os.path.abspath(asked)
    patterns, package = LIBRARIES[asked]
    folders = [*filter(None, environ.get("LD_LIBRARY_PATH", "").split(":")), f"{sys.prefix}/lib", *FOLDERS]
    for pattern in patterns:
        for folder in folders:
            found = sorted(glob.glob(os.path.join(folder, pattern)))
            if found:
                return found[0]
    raise PlacementError(
        f"--preload {asked}: no {' or '.join(patterns)} in {', '.join(folders)}; "
        f"install it (Debian: {package}) or give its path"
    )


def preload_variable(library: str, environ: Mapping[str, str]) -> str:
    """LD_PRELOAD with the library first, before what the user preloads already."""
    return ":".join(filter(None, (library, environ.get("LD_PRELOAD", ""))))
