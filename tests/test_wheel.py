"""The wheel contains no measured documents, which nothing reads at run time."""

from pathlib import Path, PurePosixPath

from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[1]
DATA = {".csv", ".json", ".png", ".svg"}
READ_AT_RUN_TIME = {"services/gateway/page", "services/sizing/figures"}


def test_wheel_contains_only_data_that_is_read_at_run_time() -> None:
    files = [
        PurePosixPath(file.distribution_path)
        for file in WheelBuilder(str(ROOT)).recurse_included_files()
    ]
    folders = {str(file.parent) for file in files if file.suffix in DATA}
    assert folders == READ_AT_RUN_TIME
