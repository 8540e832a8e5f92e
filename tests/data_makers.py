"""Raw data sets laid out on disk as people publish them, small."""

import base64
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from PIL import Image


def image_bytes(seed=0, size=(64, 48), kind="JPEG"):
    """An encoded image; another one for each seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1] // 8, size[0] // 8, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize(size).save(buffer, kind)
    return buffer.getvalue()


def turns(question, answer):
    """Two turns as LLaVA writes them."""
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]


def llava_records(folder, count=10):
    """LLaVA records of all shapes, and their images below `folder/images`."""
    images = Path(folder) / "images"
    (images / "coco").mkdir(parents=True, exist_ok=True)
    records = []
    for i in range(count):
        record = {"id": f"sample-{i}"}
        if i % 3 == 0:  # text only
            record["conversations"] = turns(f"What is {i}?", "A number. " * (1 + i % 4))
        else:
            names = [f"coco/{i:06d}-{j}.jpg" for j in range(1 if i % 3 == 1 else 2)]
            for j, name in enumerate(names):
                (images / name).write_bytes(image_bytes(100 * i + j, (64 + 16 * (i % 5), 48)))
            marks = "<image>\n" * len(names)
            record["image"] = names[0] if len(names) == 1 else names
            record["conversations"] = turns(f"{marks}What is shown in {i}?", f"Picture {i}. ünï")
        records.append(record)
    return records


def write_json(path, value):
    """An array as `json.dump(..., indent=...)` writes it."""
    path = Path(path)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")
    return path


def write_jsonl(path, records):
    """One record a line."""
    path = Path(path)
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def llava_set(folder, count=10, name="llava_instruct.json"):
    """A LLaVA data set: annotation beside the folder of images. Returns the annotation."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write = write_json if name.endswith(".json") else write_jsonl
    records = llava_records(folder, count)
    for record in records:
        if "image" in record:
            one = isinstance(record["image"], str)
            names = [record["image"]] if one else record["image"]
            names = [f"images/{n}" for n in names]
            record["image"] = names[0] if one else names
    return write(folder / name, records)


def data_uri(data, kind="jpeg"):
    """An image as OpenAI-style messages carry it."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def write_tar(path, members):
    """A WebDataset shard of (name, content)."""
    path = Path(path)
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def write_parquet(path, rows, row_group_size=4):
    """Rows as the datasets library writes them, with image structs where there are images."""
    path = Path(path)
    pa.parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return path


def texts(sample):
    """Role and text of each turn of a sample that was read."""
    return [(message.role, message.content) for message in sample.messages]
