from pathlib import Path

from stretto.base.disk import write_atomic


def test_a_link_in_the_place_of_the_file_or_its_temporary_name_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    for name in ("report.html", "report.html.partial"):
        (tmp_path / name).symlink_to(tmp_path / "secret")
        write_atomic(tmp_path / "report.html", b"page")
        assert (tmp_path / "report.html").read_text() == "page" and not (tmp_path / "report.html").is_symlink()
        assert (tmp_path / "secret").read_text() == "secret"
