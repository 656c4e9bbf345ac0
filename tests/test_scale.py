"""Slices, processes and devices: however a sweep is spread, the table is the same to the last byte."""

import os
import socket
import subprocess
import sys

import numpy as np
import pytest
from helpers import refusal

from jaxacct.sweeps import merge, plan, read_table, sweep
from jaxacct.sweeps.grid import concatenate, expand
from jaxacct.sweeps.run import LARGEST_BLOCK, SMALLEST_BLOCK, lay_out

GRID = {"noise_multiplier": [2.0, 4.0, 8.0], "sampling_probability": 1.0, "steps": [1, 4, 9], "delta": 1e-5}
"""Gaussian throughout: answered by a formula, so nothing is compiled."""
ACCURACY = {"relation": "add_or_remove_one", "engine": "auto", "rtol": 1e-4, "backend": "auto"}


def mixed():
    """Return a grid whose rows ask by turns for epsilon and for noise, as a CSV grid may."""
    known = {"sampling_probability": 1.0, "steps": [1, 4, 9]}
    asked = expand({**known, "noise_multiplier": 3.0, "delta": 1e-5})
    target = expand({**known, "target_epsilon": 1.0, "target_delta": 1e-5})
    return concatenate([asked, target]).take([0, 3, 1, 4, 2, 5])


def parts(folder, grid, count, **arguments):
    out = folder / "result.csv"
    for i in range(1, count + 1):
        sweep(grid, out=out, shard=f"{i}/{count}", **arguments)
    assert not out.exists()
    return [folder / f"result.csv.{i}-of-{count}.part" for i in range(1, count + 1)]


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_merged_slices_are_the_bytes_of_one_process(tmp_path, count, ending):
    whole, merged = tmp_path / f"whole.{ending}", tmp_path / f"merged.{ending}"
    table = sweep(mixed(), out=whole, block=2)
    files = parts(tmp_path, mixed(), count, block=2)
    assert len(merge(files[::-1], merged)) == len(table)
    assert merged.read_bytes() == whole.read_bytes()
    assert all(path.exists() for path in files)


def test_a_slice_is_its_rows_in_the_order_of_the_grid(tmp_path):
    piece = sweep(GRID, out=tmp_path / "result.csv", shard="2/2", block=2)
    whole = sweep(GRID)
    assert piece["upper"].tolist() == whole["upper"][[2, 3, 6, 7]].tolist()


def test_a_finished_part_is_kept_or_replaced_as_told(tmp_path):
    (part, _) = parts(tmp_path, GRID, 2, block=2)
    before, out = part.read_bytes(), tmp_path / "result.csv"
    assert "is there already; keep it with --resume" in refusal(sweep, GRID, out=out, shard="1/2", block=2)
    assert len(sweep(GRID, out=out, shard="1/2", block=2, resume=True)) == 5
    assert part.read_bytes() == before
    assert "rtol" in refusal(sweep, GRID, out=out, shard="1/2", block=2, resume=True, rtol=1e-3)
    sweep(GRID, out=out, shard="1/2", block=2, overwrite=True)
    assert part.read_bytes() == before


def test_parts_that_do_not_make_a_whole_are_refused(tmp_path):
    first, second, third = parts(tmp_path, GRID, 3, block=2)
    out = tmp_path / "merged.csv"
    assert "5 of 9 rows are missing: no part of slice 2/3, 3/3" in refusal(merge, [first], out)
    assert "no part of slice 2/3; give all 3 parts" in refusal(merge, [first, third], out)
    copy = tmp_path / "copy.part"
    copy.write_bytes(second.read_bytes())
    assert "overlap: both hold slice 2/3" in refusal(merge, [first, second, copy, third], out)
    other = tmp_path / "other"
    other.mkdir()
    foreign = parts(other, {**GRID, "delta": 1e-6}, 3, block=2)
    message = refusal(merge, [first, second, foreign[2]], out)
    assert "belongs to another sweep" in message and "another grid" in message
    halves = parts(tmp_path, GRID, 2, block=2)
    assert "slice 2/2 instead of one of 3" in refusal(merge, [first, second, halves[1]], out)
    second.write_bytes(second.read_bytes()[:-1])
    assert "of 9 rows are missing" in refusal(merge, [first, second, third], out)
    copy.write_text("nothing")
    assert "is no part of a sweep" in refusal(merge, [first, copy], out)
    assert "cannot be read: No such file" in refusal(merge, [tmp_path / "absent.part"], out)
    assert "parts is empty" in refusal(merge, [], out)
    assert not out.exists()


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "a/b", "1/2/3", "-1/2", ""])
def test_a_bad_slice_is_refused(tmp_path, shard):
    assert "must be i/n with 1 <= i <= n" in refusal(sweep, GRID, out=tmp_path / "result.csv", shard=shard)


def test_a_slice_needs_a_result_to_be_part_of():
    assert "shard needs out" in refusal(sweep, GRID, shard="1/2")
    assert "leave one of them out" in refusal(sweep, GRID, shard="1/2", distributed=True)


def test_blocks_hold_one_quantity_and_cover_the_grid_once():
    work = lay_out(mixed(), "product", None, 2, None, **ACCURACY)
    assert sorted(np.concatenate(work.blocks)) == list(range(6))
    for rows in work.blocks:
        assert rows.size <= 2 and len(set(work.grid.quantity[rows])) == 1


@pytest.mark.parametrize(("rows", "block"), [(1, SMALLEST_BLOCK), (10_000, 1024), (70_000, LARGEST_BLOCK)])
def test_the_size_of_a_block_follows_from_that_of_the_grid(rows, block):
    grid = {**GRID, "steps": 1, "noise_multiplier": np.linspace(1, 2, rows)}
    work = lay_out(grid, "product", None, None, None, **ACCURACY)
    assert work.block == block and sum(rows.size for rows in work.blocks) == rows


def test_a_plan_counts_and_times():
    found = plan(mixed(), block=2, shard="2/2")
    assert (found.configurations, found.own, found.blocks) == (6, 2, 2)
    assert found.quantities == {"noise_multiplier": 3, "epsilon": 3} and found.sample == 2
    assert found.seconds > 0 and found.first_seconds >= 0 and found.memory_bytes > 2**30
    assert "rtol = 2.0 must be" in refusal(plan, GRID, rtol=2.0)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_result_reads_back_as_it_was(tmp_path, ending):
    path = tmp_path / f"result.{ending}"
    table = sweep(mixed(), out=path)
    again = read_table(path)
    assert list(again.columns) == list(table.columns)
    for name, column in table.columns.items():
        assert np.array_equal(again[name], column, equal_nan=column.dtype == np.float64)
    copy = tmp_path / f"copy.{ending}"
    (again.to_csv if ending == "csv" else again.to_parquet)(copy)
    assert copy.read_bytes() == path.read_bytes()


def test_what_is_no_result_is_refused(tmp_path):
    path = tmp_path / "result.csv"
    path.write_text("a,b\n1,2\n")
    assert "is no result of a sweep: could not convert" not in refusal(read_table, path)
    path.write_text("quantity,relation,lower\nepsilon,add_one,x\n")
    assert "could not convert string to float: 'x'" in refusal(read_table, path)
    path.write_text("quantity,relation\nepsilon\n")
    assert "line 2 has 1 cells under a header of 2" in refusal(read_table, path)
    assert "must end in .csv or .parquet" in refusal(read_table, tmp_path / "result.txt")
    assert "cannot be read" in refusal(read_table, tmp_path / "absent.csv")
    (tmp_path / "bad.parquet").write_text("no")
    assert "is no result of a sweep" in refusal(read_table, tmp_path / "bad.parquet")


def test_a_product_grid_has_labelled_axes():
    pytest.importorskip("xarray")
    fields = {"dataset_size": 100, "batch_size": [100, 100 / 3], "epochs": [3, 1], "target_epsilon": [2.0, 1.0]}
    table = sweep({**fields, "batch_size": 100, "target_delta": [1e-5, 1e-6]})
    data = table.to_xarray()
    assert dict(data.sizes) == {"epochs": 2, "target_epsilon": 2, "target_delta": 2}
    assert data["epochs"].values.tolist() == [3, 1] and float(data.dataset_size) == 100
    row = (table["epochs"] == 3) & (table["target_epsilon"] == 1) & (table["target_delta"] == 1e-6)
    at = data.sel(epochs=3, target_epsilon=1.0, target_delta=1e-6)
    assert float(at.noise_multiplier) == table["noise_multiplier"][row].item() and float(at.steps) == 3
    assert "steps" in data.coords and "noise_multiplier" in data.data_vars and str(at.status.item()) == "ok"


def test_other_tables_have_no_labelled_axes():
    pytest.importorskip("xarray")
    zipped = sweep({**GRID, "steps": [1, 4, 9]}, mode="zip")
    assert "is no product of its inputs (3 noise_multiplier x 3 steps)" in refusal(zipped.to_xarray)
    assert "labelled axes need one quantity" in refusal(sweep(mixed()).to_xarray)
    assert "repeated values" in refusal(sweep({**GRID, "steps": [1, 1]}).to_xarray)


FOUR_DEVICES = "--xla_force_host_platform_device_count=4"
CALIBRATED = """
target_delta = 1e-5
target_epsilon = {start = 2, stop = 6, num = 600, scale = "log"}
sampling_probability = 0.05
steps = 4000
"""
"""All rows are on the lowest rungs, so few programs are compiled. The last bit of a result changes the solved noise."""


def start(folder, *options, **environment):
    environment = os.environ | {"JAXACCT_CACHE_DIR": "", "PYTHONPATH": ":".join(sys.path)} | environment
    command = [sys.executable, "-m", "jaxacct", "sweep", "grid.toml", *options]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process):
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error.decode()
    return out.decode()


@pytest.mark.slow  # test_accounting_device.py has the chunks of a small program
def test_four_devices_give_the_bytes_of_one(tmp_path):
    (tmp_path / "grid.toml").write_text(CALIBRATED)
    finish(start(tmp_path, "--out", "four.csv", XLA_FLAGS=FOUR_DEVICES))
    finish(start(tmp_path, "--out", "one.csv"))
    assert (tmp_path / "four.csv").read_bytes() == (tmp_path / "one.csv").read_bytes()


@pytest.mark.slow  # slices and their merging are tested above, in one process
def test_two_processes_on_loopback_give_the_bytes_of_one(tmp_path):
    text = "noise_multiplier = [2, 3, 4, 6]\nsampling_probability = [0.05, 1]\nsteps = 4000\ndelta = 1e-5\n"
    (tmp_path / "grid.toml").write_text(text)
    finish(start(tmp_path, "--out", "one.csv", "--block", "3"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    shared = ("--out", "two.csv", "--block", "3", "--distributed", "--coordinator", address, "--process-count", "2")
    processes = [start(tmp_path, *shared, "--process-id", str(number)) for number in (1, 0)]
    outputs = [finish(process) for process in processes]
    assert "rows      3" in outputs[0] and "rows      8" in outputs[1]
    assert (tmp_path / "two.csv").read_bytes() == (tmp_path / "one.csv").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"grid.toml", "one.csv", "two.csv"}
