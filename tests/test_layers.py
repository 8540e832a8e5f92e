"""Imports point down only, heavy packages have one importer, and `import omniload` is light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "omniload"

# each layer may import itself's bottom row and the names listed; siblings never meet below loader
BOTTOM = {"errors", "types", "index", "source", "world", "rng", "costs", "flops", "metrics",
          "_checkout", "_checks", "_checksum", "_jit", "_memory", "_torch_arguments",
          "_workers"}  # fmt: skip
ALLOWED = {
    "grouping": {"_native"},
    "plan": {"grouping", "balance", "bounds", "_native"},
    "shards": {"cache"},
    "images": {"_native"},
    "transforms": {"images", "mrope", "_native"},
    "conversations": {"images", "transforms"},
    "tars": {"cache", "conversations", "images", "shards", "transforms"},
    "mixture": {"cache", "images", "shards", "tars"},
    "interop": {"batch", "conversations", "images", "padding", "stream", "tars", "transforms"},
    "stream": {"batch", "grouping", "loss", "packing", "padding", "transforms"},
    "mrope": {"_native"},
    "kernels": set(),
    "_native": set(),
    "_layout": set(),
    "_rows": set(),
    "padding": set(),
    "loss": set(),
    "_step": {"_layout", "loss"},
    "_unpack": {"_layout", "_step", "loss"},
    "attention": {"masks", "kernels", "_native"},
    "_normalize": {"_native", "kernels"},
    "_layer_types": {"attention"},
    "batch": {"_layer_types", "_layout", "_normalize", "_step", "_unpack", "attention", "masks",
              "kernels", "_native"},
    "packing": {"mrope", "_layout", "_rows", "batch", "padding", "kernels", "_native"},
    "model_check": set(),
    "isolation": {"batch", "model_check"},
    "_mask_checks": {"kernels"},
    "_mask_tensors": {"_mask_checks", "kernels"},
    "_mask_native": {"_mask_tensors", "_native"},
    "masks": {"_mask_checks", "_mask_native", "_mask_tensors", "kernels", "_native"},
    "pipeline": {"plan"},
    "sampler": {"grouping", "plan"},
    "loader": {"_layout", "grouping", "mixture", "plan", "shards", "tars", "images", "transforms",
               "batch", "packing", "padding", "loss", "masks", "kernels", "_native"},
    "adapters": {"loader", "grouping", "plan", "shards", "images", "transforms", "batch", "packing",
                 "loss", "masks", "kernels", "pipeline", "_native"},
}  # fmt: skip
ONE_IMPORTER = {
    "deepspeed": "omniload/adapters/deepspeed/",
    "triton": "kernels/",
    "omniload._C": {"omniload/_native.py"},
    "transformers": {"omniload/transforms/processor.py"},
}


def sources():
    for folder in ("omniload", "kernels", "tools"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def imported_names(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_of(path):
    relative = path.relative_to(ROOT)
    if relative.parts[0] in ("kernels", "tools"):
        return relative.parts[0]
    return relative.parts[1].removesuffix(".py")


def test_imports_point_down_only():
    wrong = []
    for path in sources():
        layer = layer_of(path)
        if layer in ("tools", "__init__", "__main__"):
            continue
        allowed = BOTTOM | ALLOWED.get(layer, set()) | {layer} if layer not in BOTTOM else BOTTOM
        for name in imported_names(path):
            parts = name.split(".")
            if parts[0] == "omniload" and len(parts) > 1:
                target = parts[1]
                is_module = (PACKAGE / target).is_dir() or (PACKAGE / f"{target}.py").is_file()
                if (is_module or target in ("kernels", "tools")) and target not in allowed:
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("heavy", sorted(ONE_IMPORTER))
def test_heavy_packages_have_one_importer(heavy):
    home = ONE_IMPORTER[heavy]
    wrong = []
    for path in sources():
        name = path.relative_to(ROOT).as_posix()
        at_home = name.startswith(home) if isinstance(home, str) else name in home
        uses = any(n == heavy or n.startswith(f"{heavy}.") for n in imported_names(path))
        if uses and not at_home:
            wrong.append(name)
    assert not wrong


def test_rank_variables_are_read_in_world_only():
    readers = []
    for path in sources():
        text = path.read_text(encoding="utf-8")
        names = ('"RANK"', '"WORLD_SIZE"', '"LOCAL_RANK"', '"GROUP_RANK"', '"NODE_RANK"')
        if any(name in text for name in names):
            readers.append(path.relative_to(ROOT).as_posix())
    assert readers == ["omniload/world.py"]


def test_importing_omniload_loads_nothing_heavy():
    code = (
        "import sys, omniload\n"
        "heavy = {'torch', 'numba', 'triton', 'deepspeed', 'pyarrow', 'numpy', 'PIL'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_every_public_name_resolves():
    import omniload

    for name in omniload.__all__:
        assert getattr(omniload, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        omniload.Nothing  # noqa: B018


def test_modules_stay_small():
    large = [
        f"{path.relative_to(ROOT)}: {lines}"
        for path in sources()
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 400
    ]
    assert not large
