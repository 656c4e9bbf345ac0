"""Each fact that a claim depends on stands in the ledger: without it the reader refuses, or claims no less."""

import copy
import json
import re
import zlib
from pathlib import Path

import pytest
from training_cases import DELTA, note

import jaxacct as ja
from jaxacct import strategies
from jaxacct.core.validation import InputError
from jaxacct.training import Ledger, Plan

TABLE = Path(ja.__file__).parent / "training" / "ledger" / "README.md"
GIVEN = {"target_delta": DELTA, "dataset_size": 1000, "noise_multiplier": 1.5, "steps": 10}


def truncated(path):
    plan = Plan(**GIVEN, sampling="truncated_poisson", sampling_probability=0.05, cap=80, unit="user")
    with Ledger.create(path, plan, "r", "ada") as ledger:
        for step in range(3):
            note(ledger, step, noise=1.5, rate=0.05)
        ledger.spend(ja.PoissonSampled(ja.Gaussian(4.0), 0.1, group=1), "a look")
        ledger.seen(3)
    path.write_bytes(path.read_bytes() + b'{"kind": "step", "run": "r"')
    Ledger.open(path).close()


def rounds(path):
    plan = Plan(**GIVEN, sampling="random_allocation", slots=5)
    with Ledger.create(path, plan, "r", "ada") as ledger:
        for step in range(7):
            note(ledger, step, noise=1.5, rate=0.2, partition=str(step // 5))
        ledger.spend(ja.PoissonSampled(ja.Gaussian(4.0), 0.1, group=3), "a look")
        ledger.spend(ja.RandomAllocation(ja.Gaussian(4.0), 4, group=2), "rounds")
        ledger.seen(7, looked=False)


def batches(path):
    plan = Plan(**GIVEN, sampling="fixed_batches", expected_batch_size=250)
    with Ledger.create(path, plan, "r", "ada") as ledger:
        for step in range(6):
            note(ledger, step, noise=1.5, rate=0.25, partition=str(step // 4))
        ledger.seen(6)


def groups(path):
    more = {"sampling": "cyclic_poisson", "noise": strategies.Toeplitz((1.0, 0.5)), "groups": 4}
    plan = Plan(**GIVEN, **more, sampling_probability=0.2)
    with Ledger.create(path, plan, "r", "ada") as ledger:
        for step in range(6):
            note(ledger, step, noise=1.5, rate=0.2, partition=str(step // 4))
        ledger.seen(6)
    path.write_bytes(path.read_bytes() + b'{"kind": "step", "run": "r"')
    Ledger.open(path).close()


LEDGERS = {"truncated": truncated, "rounds": rounds, "batches": batches, "groups": groups}


def chained(nodes):
    total, content = 0, b""
    for node in nodes:
        body = json.dumps({name: value for name, value in node.items() if name != "check"})[:-1].encode()
        total = zlib.crc32(body, total)
        content += body + f', "check": "{total:08x}"}}\n'.encode()
    return content


def places(node, before=()):
    """The paths of all keys of a line, those within its mechanism or plan included."""
    if isinstance(node, dict):
        for key, inner in node.items():
            yield (*before, key)
            yield from places(inner, (*before, key))


def rows():
    """The fields that the table names, as kind.field; `run` stands for `run.run`, and `check` for that of all kinds."""
    text = TABLE.read_text(encoding="utf-8")
    table = text[text.index("| fact | where |") : text.index("**Never too little.**")]
    cells = [line.split("|")[2] for line in table.splitlines()[2:] if line.startswith("|")]
    return set(re.findall(r"`([a-z._]+)`", " ".join(cells)))


@pytest.mark.parametrize("kind", LEDGERS)
def test_no_claim_is_smaller_without_a_fact(path, kind):
    LEDGERS[kind](path)
    nodes = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert chained(nodes) == path.read_bytes()
    claimed = float(Ledger.read(path).epsilon(DELTA).upper)
    refused, same = set(), set()
    kinds = [node["kind"] for node in nodes]
    ends = {place for kind in set(kinds) for place in (kinds.index(kind), len(kinds) - 1 - kinds[::-1].index(kind))}
    for number in sorted(ends):  # the first and the last line of each kind
        node = nodes[number]
        for place in places(node):
            changed = copy.deepcopy(nodes)
            inside = changed[number]
            for key in place[:-1]:
                inside = inside[key]
            del inside[place[-1]]
            name = ".".join([node["kind"], *place])
            path.write_bytes(chained(changed))
            try:
                found = float(Ledger.read(path).epsilon(DELTA).upper)
            except InputError as error:
                assert "\n" not in str(error)
                refused.add(name)
                continue
            assert found >= claimed * (1 - 1e-9), name
            same.add(name)
    assert same <= {"run.plan.unit", "run.check", "step.check", "spend.check", "seen.check", "torn.check"}
    assert {"step.noise_multiplier", "step.sampling", "seen.until", "run.version"} <= refused


@pytest.mark.parametrize("kind", LEDGERS)
def test_a_line_less_is_refused(path, kind):
    """A ledger without its last line looks like an earlier state of the ledger, and is refused only against a mark."""
    LEDGERS[kind](path)
    lines = path.read_bytes().splitlines(keepends=True)
    mark = Ledger.read(path).mark()
    for number in range(len(lines)):
        path.write_bytes(b"".join(lines[:number] + lines[number + 1 :]))
        with pytest.raises(InputError):
            Ledger.read(path).require(mark)
        if number < len(lines) - 1:
            with pytest.raises(
                InputError, match="damaged, or a line before it is missing|is of a run that never began"
            ):
                Ledger.read(path)


def test_the_table_names_every_field(path):
    found = set()
    for make in LEDGERS.values():
        make(path)
        found |= {
            f"{json.loads(line)['kind']}.{key}" for line in path.read_bytes().splitlines() for key in json.loads(line)
        }
        path.unlink()
    fields = {name for name in found if name.split(".")[1] not in ("check", "kind")} | {"check", "run"}
    fields -= {"run.run"}  # which the table calls `run`
    assert rows() == fields


def test_an_old_version_is_taken_at_its_most(path):
    """Version 1 said nothing of looks, so a ledger whose version is changed to 1 claims the whole plan."""
    plan = Plan(**GIVEN, sampling_probability=0.05)
    with Ledger.create(path, plan, "r") as ledger:
        note(ledger, 0, noise=1.5, rate=0.05)
    nodes = [json.loads(line) for line in path.read_bytes().splitlines()]
    nodes[0]["version"] = 1
    path.write_bytes(chained(nodes))
    assert float(Ledger.read(path).epsilon(DELTA).upper) == float(plan.epsilon.upper)
    nodes[0]["version"] = 4
    path.write_bytes(chained(nodes))
    with pytest.raises(InputError, match="version 1 to 3, which this release reads"):
        Ledger.read(path)


@pytest.mark.parametrize("version", [2, 3])
def test_the_end_of_a_seen_run_is_that_of_its_plan_in_version_2(path, version):
    """In version 2 `until` could be too small, if noise fell within a pass; so the whole plan counts."""
    plan = Plan(**GIVEN, sampling_probability=0.05)
    with Ledger.create(path, plan, "r") as ledger:
        note(ledger, 0, noise=plan.noise_multiplier, rate=0.05)
        ledger.seen(1)
    nodes = [json.loads(line) for line in path.read_bytes().splitlines()]
    nodes[0]["version"], nodes[-1]["until"] = version, 2
    path.write_bytes(chained(nodes))
    whole = float(Ledger.read(path).epsilon(DELTA).upper) == float(plan.epsilon.upper)
    assert whole == (version == 2)
