"""The C++ extension and the mapping of kernels/ and tools/ into the package.

All metadata is in pyproject.toml.
"""

import os

from setuptools import Extension, find_packages, setup

# import name -> source folder: nothing but `omniload` may land in site-packages
MOUNTED = {"omniload.kernels": "kernels", "omniload.tools": "tools"}

packages = find_packages(include=["omniload", "omniload.*"])
for name, folder in MOUNTED.items():
    packages += [name, *(f"{name}.{sub}" for sub in find_packages(folder))]

sanitize = os.environ.get("OMNILOAD_SANITIZE") == "1"
flags = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]

extension = Extension(
    "omniload._C",
    sources=[
        "csrc/binding.cpp",
        "csrc/masks.cpp",
        "csrc/mrope.cpp",
        "csrc/pack.cpp",
        "csrc/resize.cpp",
        "csrc/tiles.cpp",
    ],
    depends=[
        "csrc/masks.h",
        "csrc/mrope.h",
        "csrc/pack.h",
        "csrc/resize.h",
        "csrc/tiles.h",
        "csrc/vectors.h",
    ],
    include_dirs=["csrc"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    extra_compile_args=["-std=c++17", "-fvisibility=hidden", *(flags if sanitize else ["-O3"])],
    extra_link_args=["-fsanitize=address,undefined"] if sanitize else [],
    language="c++",
    py_limited_api=True,
    optional=True,  # no compiler: omniload falls back to NumPy with equal results
)

setup(
    packages=packages,
    package_dir={"omniload": "omniload", **MOUNTED},
    ext_modules=[] if os.environ.get("OMNILOAD_NO_EXTENSION") == "1" else [extension],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
