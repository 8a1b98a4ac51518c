"""Builds the compiled kernel of the record codec, src/semel/records/kernel.pyx, beside its source.

Cython makes C of it, and the system's C compiler a module for Python's stable ABI: one file for every Python from 3.11
on. Where no compiler works, the build asks for `ziglang` as a requirement, which holds one. Where that fails too, Semel
is installed without the kernel, and the readable codec serves. SEMEL_KERNEL=off leaves it out on purpose, and
SEMEL_KERNEL=on makes a build without it fail.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("src/semel/records/kernel.pyx")
STABLE_ABI = "0x030B0000"  # Python 3.11, the first whose stable ABI has buffers
# The stable ABI knows no Python without the GIL: such a one gets a module of its own.
IS_STABLE = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
# Only where PyPI has it, or the whole installation would fail.
ZIG = "ziglang>=0.13; sys_platform != 'win32' and platform_machine in 'x86_64 aarch64 arm64'"
TRIAL = "#include <stdint.h>\n#include <stdlib.h>\n#include <string.h>\nint trial(void) { return 0; }\n"
SHARED = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared", "-fPIC"]


class KernelHook(BuildHookInterface[Any]):
    def dependencies(self) -> list[str]:
        is_wanted = self.target_name == "wheel" and _mode() != "off" and _has_python_headers()
        return [ZIG] if is_wanted and _system_compiler() is None else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        source = Path(self.root) / SOURCE
        module = source.with_name("kernel.abi3.so" if IS_STABLE else f"kernel{sysconfig.get_config_var('EXT_SUFFIX')}")
        why_not = build_kernel(source, module)
        if why_not is not None:
            module.unlink(missing_ok=True)  # it would be that of another source
            if _mode() == "on":
                raise RuntimeError(f"The compiled codec could not be built: {why_not}")
            self.app.display_warning(f"Semel is installed without its compiled codec: {why_not}")
            return
        build_data["pure_python"] = False
        build_data["artifacts"].append(str(module.relative_to(self.root)))
        if IS_STABLE:
            build_data["tag"] = f"cp311-abi3-{_platform()}"
        else:
            build_data["infer_tag"] = True


def build_kernel(source: Path, module: Path, extra: tuple[str, ...] = ()) -> str | None:
    """Compile `source` into `module`; returns why that was not possible, if it was not."""
    if _mode() == "off":
        return "SEMEL_KERNEL=off says so."
    if not _has_python_headers():
        return "Python's headers are missing. Install them: apt-get install python3-dev"
    compiler = _system_compiler() or _zig()
    if compiler is None:
        return "There is no C compiler. Install one: apt-get install gcc libc6-dev"
    from Cython.Compiler.Main import compile_single
    from Cython.Compiler.Options import CompilationOptions

    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "kernel.c"
        options = CompilationOptions(output_file=str(written), language_level=3)
        result = compile_single(str(source), options, "semel.records.kernel")
        if result.num_errors:
            return "Cython does not take its source."
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
        flags = [*SHARED, "-O3", "-g0", "-DNDEBUG", f'-DSEMEL_SOURCE_DIGEST="{digest}"', *extra]
        if IS_STABLE:
            flags.append(f"-DPy_LIMITED_API={STABLE_ABI}")
        # Beside the old one and then in its place: a process that has the old one loaded keeps it.
        new = module.with_name(f".{module.name}.{os.getpid()}")
        include = [f"-I{sysconfig.get_path(name)}" for name in ("include", "platinclude")]
        done = _run([*compiler, *flags, *include, str(written), "-o", str(new)], folder)
        if done.returncode != 0:
            new.unlink(missing_ok=True)
            return f"{shlex.join(compiler)} does not compile it: {done.stderr[-2000:]}"
        new.replace(module)
    return None


def _mode() -> str:
    return os.environ.get("SEMEL_KERNEL", "auto")


def _has_python_headers() -> bool:
    return (Path(sysconfig.get_path("include")) / "Python.h").exists()


def _system_compiler() -> list[str] | None:
    """The first that makes a shared library of a few lines: one without a C library's headers is no use."""
    named = os.environ.get("CC")
    for command in [shlex.split(named)] if named else [["cc"], ["gcc"], ["clang"]]:
        if command and shutil.which(command[0]) and _works(command):
            return command
    return None


def _zig() -> list[str] | None:
    # As a module of the environment in which the build runs. Its checks for undefined behaviour are for debugging.
    command = [sys.executable, "-m", "ziglang", "cc", "-fno-sanitize=undefined"]
    return command if _works(command) else None


def _works(command: list[str]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        trial = Path(folder) / "trial.c"
        trial.write_text(TRIAL)
        try:
            return _run([*command, *SHARED, str(trial), "-o", str(trial.with_suffix(".so"))], folder).returncode == 0
        except OSError:
            return False


def _run(command: list[str], folder: str) -> subprocess.CompletedProcess[str]:
    # Zig keeps what it compiles in the home directory, which may not be writable where packages are built.
    variables = {"ZIG_GLOBAL_CACHE_DIR": str(Path(tempfile.gettempdir()) / "semel-zig"), **os.environ}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=variables)


def _platform() -> str:
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
