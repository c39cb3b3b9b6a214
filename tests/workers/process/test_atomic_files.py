"""What is replaced is whole or as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.process.atomic_files import replaced, replaced_folder


def test_a_file_is_replaced_when_the_block_ends_and_kept_if_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replaced(path, mode=0o600) as beside:
        beside.write_text("first")
        assert not path.exists()
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileNotFoundError), replaced(path) as beside:
        beside.with_name("absent").rename("elsewhere")
    assert path.read_text() == "first"
    with replaced(path) as one, replaced(path) as other:
        one.write_text("one")
        other.write_text("other")
    assert path.read_text() == "one", "the block that ended last wins"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_replaced_when_the_block_ends_and_kept_if_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "in" / "folder"
    with replaced_folder(path) as beside:
        (beside / "old").write_text("")
        assert not path.exists()
    with pytest.raises(FileNotFoundError), replaced_folder(path) as beside:
        (beside / "absent").rename("elsewhere")
    assert [one.name for one in path.iterdir()] == ["old"]
    (path.parent / ".folder.new").mkdir()
    (path.parent / ".folder.new" / "of one that was killed").write_text("")
    with replaced_folder(path) as beside:
        (beside / "new").write_text("")
    assert [one.name for one in path.iterdir()] == ["new"]
    assert list(path.parent.iterdir()) == [path]
    path.rename(path.with_name(".folder.old"))  # As if killed between the two renames.
    with pytest.raises(FileNotFoundError), replaced_folder(path) as beside:
        (beside / "absent").rename("elsewhere")
    assert [one.name for one in path.iterdir()] == ["new"]
