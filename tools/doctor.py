"""`omniload doctor`: what this environment has, what it lacks, and what to do about it."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import platform
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

__all__ = ["doctor"]

_MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[red]problem[/]"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report."""

    part: str
    state: str  # "ok", "note" (works, slower or without a feature), "problem"
    found: str
    remedy: str = ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Check this environment: extension, image codecs, optional packages.

    Exit code 1 when something that omniload needs does not work.

    Example: `omniload doctor`
    """
    findings = [
        *_packages(),
        _native(),
        _numba_cache(),
        *_pillow(),
        _resize(),
        *_optional(),
    ]
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        _print(findings)
    if any(finding.state == "problem" for finding in findings):
        raise typer.Exit(1)


def _print(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_lines=False)
    for column in ("part", "", "found", "remedy"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(
            finding.part, _MARKS[finding.state], escape(finding.found), escape(finding.remedy)
        )
    Console().print(table)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages() -> list[Finding]:
    findings = [
        Finding(
            part="python", state="ok", found=f"{platform.python_version()} on {platform.machine()}"
        )
    ]
    for module, distribution in (
        ("torch", "torch"),
        ("numpy", "numpy"),
        ("numba", "numba"),
        ("pyarrow", "pyarrow"),
        ("simplejpeg", "simplejpeg"),
        ("tokenizers", "tokenizers"),
    ):
        try:
            importlib.import_module(module)
        except ImportError as error:
            findings.append(
                Finding(
                    part=module,
                    state="problem",
                    found=str(error),
                    remedy=f"pip install {distribution}",
                )
            )
        else:
            findings.append(Finding(part=module, state="ok", found=_version(distribution) or "?"))
    return findings


def _native() -> Finding:
    from omniload import _native

    if _native.available():
        return Finding(part="C++ extension", state="ok", found="built")
    return Finding(
        part="C++ extension",
        state="note",
        found="not built; NumPy does the same work, slower",
        remedy="install a C++17 compiler, then install omniload-vlm again from source",
    )


def _numba_cache() -> Finding:
    from omniload import _jit

    folder, reason = _jit.cache_folder()
    if folder is None:
        return Finding(
            part="compiled code cache",
            state="note",
            found=f"{reason}: Numba compiles anew in each process",
            remedy="set NUMBA_CACHE_DIR to a folder that only you can write",
        )
    return Finding(part="compiled code cache", state="ok", found=str(folder))


def _pillow() -> list[Finding]:
    from omniload import images

    both = [name for name in ("pillow", "pillow-simd") if _version(name)]
    info = images.pil_info()
    findings = [
        Finding(
            part="PIL",
            state="ok" if len(both) < 2 else "problem",
            found=f"{info.version} ({'SIMD' if info.simd else 'plain'})"
            + (f"; both {both[0]} and {both[1]} own its files" if len(both) == 2 else ""),
            remedy=""
            if len(both) < 2
            else "pip uninstall pillow pillow-simd, then install the one you want",
        )
    ]
    findings += [
        Finding(part=f"PIL: {kind}", state="note", found="can't be read", remedy=remedy)
        for kind, remedy in images.missing_codecs().items()
    ]
    return findings


def _resize() -> Finding:
    import torch

    from omniload import images
    from omniload.errors import ConfigError

    try:
        backend = images.resize_backend()
    except ConfigError as error:
        return Finding(
            part="resize",
            state="problem",
            found=str(error),
            remedy="unset OMNILOAD_RESIZE, or set it to what is installed",
        )
    capability = torch.backends.cpu.get_cpu_capability()
    found = f"{backend}; vector code of this processor: {capability}"
    if backend == "pillow" and not images.pil_info().simd:
        return Finding(
            part="resize",
            state="note",
            found=f"{found}; pixels differ slightly from those of torch and Pillow-SIMD",
            remedy="unset OMNILOAD_RESIZE",
        )
    is_slow = backend == "torch" and not images.torch_is_quick()
    return Finding(
        part="resize",
        state="note" if is_slow else "ok",
        found=found,
        remedy="torch is slow at this without AVX2: install Pillow-SIMD, the pixels are the same"
        if is_slow
        else "",
    )


def _optional() -> list[Finding]:
    findings = []
    for module, extra, use in (
        ("triton", "triton", "GPU kernels"),
        ("webdataset", "webdataset", "interoperation with webdataset pipelines"),
        ("deepspeed", "deepspeed", "pipeline training"),
        ("s3fs", "s3", "shards in S3"),
        ("matplotlib", "bench", "plots of benchmarks"),
    ):
        version = _version(module)
        findings.append(
            Finding(
                part=module,
                state="ok" if version else "note",
                found=version or f"not installed; needed for {use}",
                remedy="" if version else f"pip install 'omniload-vlm[{extra}]'",
            )
        )
    return findings
