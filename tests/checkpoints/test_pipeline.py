"""`pipeline.json`: what is written is read, and what is damaged is refused by name."""

import dataclasses
import json

import pytest
import toy_checkpoints

from shardzoo.checkpoints.manifest import FileEntry, sha256
from shardzoo.checkpoints.pipeline import PARTIAL, Component, Pipeline, is_pipeline, is_unfinished, open_pipeline
from shardzoo.errors import InputError

ENTRY = FileEntry(size=2, sha256=sha256(b"{}"))


@pytest.fixture
def pipeline(tmp_path):
    toy_checkpoints.write(tmp_path / "vae", sync=False)
    (tmp_path / "files/tokenizer").mkdir(parents=True)
    (tmp_path / "files/tokenizer/a.json").write_text("{}")
    made = Pipeline(
        path=tmp_path,
        kind="wan",
        layout="diffusers",
        components={"vae": Component(family="toy", place="vae")},
        files={"tokenizer/a.json": ENTRY},
        settings={"scheduler": {"flow_shift": 3.0}, "boundary_ratio": None},
    )
    made.write()
    return made


def test_what_is_written_is_read(pipeline, tmp_path):
    assert is_pipeline(tmp_path) and open_pipeline(tmp_path) == pipeline and not pipeline.damaged_files()
    assert pipeline.checkpoint("vae").manifest.header.family == "toy"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "pipeline.json", "vae"]
    with pytest.raises(InputError, match=r"has no 'unet', it has vae"):
        pipeline.checkpoint("unet")
    (tmp_path / "files/tokenizer/a.json").write_text("[]")
    assert "is not as it was" in pipeline.damaged_files()[0]
    (tmp_path / "files/tokenizer/a.json").unlink()
    assert "cannot be read" in pipeline.damaged_files()[0]


def test_one_bit_of_a_setting_is_noticed(pipeline, tmp_path):
    file = tmp_path / "pipeline.json"
    file.write_bytes(file.read_bytes().replace(b'"flow_shift":3.0', b'"flow_shift":7.0'))
    with pytest.raises(InputError, match="does not match its own sha256"):
        open_pipeline(tmp_path)


def edited(record, path, value):
    *steps, last = path.split("/")
    inside = record
    for step in steps:
        inside = inside[step]
    inside[last] = value
    return json.dumps(record)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("version", 2, "upgrade shardzoo"),
        ("format", "other", "format='other'"),
        ("kind", 3, "kind is not a str"),
        ("settings", [], "settings is not a dict"),
        ("components/vae", {"family": "toy"}, "component 'vae'"),
        ("components/..", {"family": "toy", "place": "x"}, "component '..'"),
        ("components/files", {"family": "toy", "place": "x"}, "component 'files'"),
        ("components/vae", {"family": "toy", "place": "../x"}, "component 'vae' at '../x' reaches outside"),
        ("components/vae", {"family": "toy", "place": "/x"}, "component 'vae' at '/x' reaches outside"),
        ("components/a~b", {"family": 3, "place": "x"}, "component 'a~b'"),
        ("files/x", {"size": "2", "sha256": ""}, "file 'x'"),
    ],
)
def test_damage_is_named(pipeline, tmp_path, path, value, named):
    file = tmp_path / "pipeline.json"
    file.write_text(edited(json.loads(file.read_text()), path, value))
    with pytest.raises(InputError) as error:
        open_pipeline(tmp_path)
    assert named in str(error.value)


def test_files_that_leave_the_folder_are_refused(pipeline, tmp_path):
    file = tmp_path / "pipeline.json"
    record = json.loads(file.read_text())
    record["files"] = {"../out": record["files"]["tokenizer/a.json"]}
    file.write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"file '\.\./out'"):
        open_pipeline(tmp_path)


def test_other_things_than_a_pipeline_are_refused(pipeline, tmp_path):
    (tmp_path / "pipeline.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        open_pipeline(tmp_path)
    (tmp_path / "pipeline.json").unlink()
    with pytest.raises(InputError, match=r"pipeline.json: cannot be read"):
        open_pipeline(tmp_path)
    (tmp_path / PARTIAL).write_text("{}")
    assert is_unfinished(tmp_path) and not is_pipeline(tmp_path)
    with pytest.raises(InputError, match="is an unfinished pipeline"):
        open_pipeline(tmp_path)


def test_a_component_of_another_family_is_refused(pipeline, tmp_path):
    dataclasses.replace(pipeline, components={"vae": Component(family="wan-vae", place="vae")}).write()
    with pytest.raises(InputError, match=r"is of family 'toy', and pipeline.json says 'wan-vae'"):
        open_pipeline(tmp_path).checkpoint("vae")
