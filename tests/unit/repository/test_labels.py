from __future__ import annotations

import pytest

from hone.errors import ConfigError

CONFIG = """
output [
  { name: 'y' data_type: TYPE_FP32 dims: 3 label_filename: 'labels.txt' },
  { name: 'z' data_type: TYPE_FP32 dims: 1 }
]
"""


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("cat\ndog\n", ("cat", "dog")),
        ("cat\ndog", ("cat", "dog")),
        ("cat\r\ndog\r\n", ("cat", "dog")),
        ("\ufeffcat\n", ("cat",)),
        ("cat\n\nbird\n", ("cat", "", "bird")),  # the index of a label is the index of its class
        ("Käse\u2028x\n", ("Käse\u2028x",)),
        ("", ()),
    ],
)
def test_labels_are_one_a_line(disk, text, labels):
    disk.model("m", CONFIG)
    disk.write("m/labels.txt", text.encode())
    assert disk.repository.read("m").labels == {"y": labels}


def test_a_missing_file_names_the_field(disk):
    disk.model("m", CONFIG)
    with pytest.raises(ConfigError) as caught:
        disk.repository.read("m")
    assert caught.value.field == "output[0].label_filename"
    assert caught.value.reason == "cannot read 'labels.txt': No such file or directory"


def test_other_encodings_name_the_line(disk):
    disk.model("m", CONFIG)
    disk.write("m/labels.txt", b"cat\nK\xe4se\n")
    with pytest.raises(ConfigError, match=r"expected UTF-8 text in 'labels\.txt', line 2 is not"):
        disk.repository.read("m")


def test_a_folder_is_no_label_file(disk):
    disk.model("m", CONFIG)
    disk.write("m/labels.txt/inner", "x")
    with pytest.raises(ConfigError, match="not a regular file"):
        disk.repository.read("m")
