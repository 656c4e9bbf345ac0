"""Lines of a ledger: JSON objects of five kinds, each with a checksum that also covers all lines before it."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxacct.core.validation import POSITIVE, PROBABILITY, Constraint, InputError, check, choice
from jaxacct.interop.documents import from_json, to_whole_json
from jaxacct.mechanisms import Mechanism, batch_shape
from jaxacct.mechanisms.dp_sgd_run import nearest_slots
from jaxacct.training.plan import Plan
from jaxacct.training.plan.plan import load, plan_document
from jaxacct.training.step.step_mechanisms import ALLOCATION, CYCLIC, SAMPLING, TRUNCATED, Turn

_FORMAT, _VERSION = "jaxacct.ledger", 3
"""Format and version that a `run` line states.  Older versions are read, too (README.md, "Outputs that were seen")."""
_MAX_LINE_BYTES = 2**24
"""Longer lines are refused unread, since strangers may write ledgers."""
LAST_STEP = Constraint("use a step number from 0", 0, 2**53, integral=True)
"""Range of step numbers and counts: whole numbers up to 2**53 are exact in float64."""
_SUFFIX = ', "check": "00000000"}'
"""Example of the end of a line, which holds its checksum.  Only the length is used."""
KIND, _STEP, _TORN = b'{"kind": "', b'{"kind": "step", ', b'{"kind": "torn", '
"""First bytes of every line, of a `step` line, and of a `torn` line."""


class Run(NamedTuple):
    """Entry that is written when a run begins, or goes on with another plan."""

    run: str
    by: str
    plan: Plan
    version: int = _VERSION

    @property
    def told(self) -> bool:
        """Whether the ledger notes when outputs of the run are seen."""
        return self.version > 1


class Seen(NamedTuple):
    """Entry that is written before outputs of a run are seen, after `step` steps of its plan."""

    run: str
    step: int
    until: int  # number of steps after which the run would have ended by itself
    looked: bool  # whether a callback asks for outputs or raises; False if something else ends the run


class Step(NamedTuple):
    """Entry that is written before the release of one training step."""

    run: str
    step: int
    key: str
    batch: str
    noise_multiplier: float
    sampling_probability: float
    sampling: str
    partition: str | None
    cap: int = 0
    dataset_size: int = 0
    groups: int = 0

    @property
    def turn(self) -> Turn:
        return Turn(self.step, self.groups, self.noise_multiplier)


class Spend(NamedTuple):
    """Entry that is written before a release other than a training step."""

    run: str
    mechanism: Mechanism
    note: str


class Torn(NamedTuple):
    """Step that counts in place of a line that was cut off."""

    run: str
    noise_multiplier: float
    sampling_probability: float
    sampling: str
    cap: int = 0
    dataset_size: int = 0


Line = Run | Step | Spend | Torn | Seen


class Chain(NamedTuple):
    """Checksums of all lines so far: `check`, a CRC-32 that the file holds, and `head`, a SHA-256 that it does not."""

    check: int
    head: bytes

    def then(self, body: bytes) -> Chain:
        """Return the checksums after one more line.  `body` is that line without its own checksum."""
        return Chain(zlib.crc32(body, self.check), hashlib.sha256(self.head + body).digest())


BEGINNING = Chain(0, b"")


def encode(line: Line, previous: Chain) -> tuple[bytes, Chain]:
    """Return a line as bytes that end in its checksum, and the `Chain` of all lines up to this one."""
    # a batch rule without `cap`, `dataset_size` or `groups` has 0 there
    fields = {name: x for name, x in line._asdict().items() if x or name not in ("cap", "dataset_size", "groups")}
    if isinstance(line, Run):
        head = {"format": _FORMAT, "version": _VERSION, "run": line.run, "by": line.by}
        fields = {**head, "plan": plan_document(line.plan)}
    elif isinstance(line, Spend):
        fields["mechanism"] = json.loads(to_whole_json(line.mechanism))
    body = json.dumps({"kind": type(line).__name__.lower(), **fields}, allow_nan=False)[:-1].encode()
    chain = previous.then(body)
    return body + f', "check": "{chain.check:08x}"}}\n'.encode(), chain


def read(file: BinaryIO, path: Path) -> Iterator[tuple[Line | bytes, Chain, int]]:
    """Yield (entry, `Chain`, end byte) for each line; for a cut-off line (bytes, `Chain` before it, first byte)."""
    chain, number = BEGINNING, 0
    told: dict[str, bool] = {}
    while raw := file.readline(_MAX_LINE_BYTES + 1):
        number += 1
        place = f"{path}: line {number}"
        whole, text = raw.endswith(b"\n"), raw.rstrip(b"\n")
        begun = text.startswith(KIND) or KIND.startswith(text)
        if number == 1 and not (text and begun) and _FORMAT.encode() not in raw[:_MAX_LINE_BYTES]:
            raise InputError(f"{path}: is no ledger: it does not begin with a run; give the ledger of a training run")
        if len(raw) > _MAX_LINE_BYTES:
            raise InputError(f"{place} has more than {_MAX_LINE_BYTES} bytes; restore the ledger from a copy")
        body = text[: -len(_SUFFIX)]
        following = chain.then(body)
        if text == body + f', "check": "{following.check:08x}"}}'.encode() and len(text) > len(_SUFFIX):
            chain = following
            line = _decode(text, place, number, told)
            if isinstance(line, Run):
                told[line.run] = line.told
            yield line, chain, file.tell()
            continue
        if number == 1 and begun and not whole:
            raise InputError(f"{path}: is no ledger, or its first line was cut off; restore the ledger from a copy")
        if whole or not begun:
            raise InputError(f"{place} is damaged, or a line before it is missing; restore the ledger from a copy")
        yield text, chain, file.tell() - len(raw)


def looks_like_a_step(fragment: bytes) -> bool:
    """Return whether a cut-off line may be the beginning of a `step` or a `torn` entry."""
    return any(_may_begin(fragment, kind) for kind in (_STEP, _TORN))


def runs_of(fragment: bytes, runs: Iterable[str]) -> list[str]:
    """Return the runs that may have written a cut-off `step` or `torn` line. If it names none of them, return all."""
    known = list(runs)
    heads = {run: [kind + f'"run": {json.dumps(run)}, '.encode() for kind in (_STEP, _TORN)] for run in known}
    return [run for run in known if any(_may_begin(fragment, head) for head in heads[run])] or known


def _may_begin(fragment: bytes, head: bytes) -> bool:
    """Return whether a line of which `fragment` is left may have begun with `head`."""
    return fragment.startswith(head) or head.startswith(fragment)


def words(name: str, value: Any, longest: int = 256) -> str:
    """Return the value; raise InputError unless it is a str of at most `longest` characters."""
    if not isinstance(value, str) or len(value) > longest:
        raise InputError(f"{name} = {value!r:.40} must be text of at most {longest} characters; shorten it")
    return value


def checked(line: Step) -> Step:
    step = check("step", line.step, LAST_STEP)
    noise = check("noise_multiplier", line.noise_multiplier, POSITIVE)
    rate = check("sampling_probability", line.sampling_probability, PROBABILITY)
    words("run", line.run), words("key_fingerprint", line.key), words("batch_fingerprint", line.batch)
    if line.partition is not None:
        words("partition", line.partition)
    choice("sampling", line.sampling, SAMPLING)
    sizes = [int(check(name, getattr(line, name), LAST_STEP)) for name in ("cap", "dataset_size", "groups")]
    if (line.sampling == CYCLIC) != (sizes.pop() > 0):
        raise InputError(f"groups = {line.groups!r:.40} must be positive with sampling = {CYCLIC!r}, and only there")
    if (line.sampling == TRUNCATED) != (min(sizes) > 0) or (line.sampling != TRUNCATED and max(sizes) > 0):
        raise InputError(f"cap and dataset_size must be positive with sampling = {TRUNCATED!r}, and only there")
    if line.sampling == ALLOCATION and not (rate > 0.0 and float(rate) == 1.0 / float(nearest_slots(rate))):
        raise InputError(f"sampling_probability = {float(rate)!r} must be 1/slots with sampling = {ALLOCATION!r}")
    line = line._replace(step=int(step), noise_multiplier=float(noise), sampling_probability=float(rate))
    return line._replace(cap=sizes[0], dataset_size=sizes[1], groups=int(line.groups))


def checked_seen(line: Seen) -> Seen:
    step, until = (int(check(name, getattr(line, name), LAST_STEP)) for name in ("step", "until"))
    if not isinstance(line.looked, bool):
        raise InputError(f"looked = {line.looked!r:.40} must be true or false; use one of them")
    return Seen(words("run", line.run), step, until, line.looked)


def _decode(text: bytes, place: str, number: int, told: dict[str, bool]) -> Line:
    """Return the entry in a whole line; raise InputError with the line's number if the line holds no entry."""
    try:
        node = load(text.decode())
        kind = node.pop("kind", None)
        node.pop("check")
        if (kind == "run") != ("format" in node) or (number == 1 and kind != "run"):
            raise ValueError("a ledger begins with a run")
        if kind == "run":
            version = node.pop("version")
            if node.pop("format") != _FORMAT or type(version) is not int or not 1 <= version <= _VERSION:
                raise ValueError(f"format must be {_FORMAT!r}, and version 1 to {_VERSION}, which this release reads")
            run, by = words("run", node.pop("run")), words("by", node.pop("by"))
            if set(node) != {"plan"}:
                raise ValueError(f"its keys {', '.join(map(repr, node))[:60]} are not those of its kind")
            return Run(run, by, Plan.from_document(node["plan"]), version)
        if kind == "seen":
            return checked_seen(Seen(**node))
        if kind == "step":
            return checked(Step(**node))
        if kind == "spend":
            written = node.pop("mechanism")
            mechanism = from_json(json.dumps(written))
            if batch_shape(mechanism):
                raise ValueError("mechanism must be one configuration")
            if told.get(node["run"], False) and written != json.loads(to_whole_json(mechanism)):
                raise ValueError("mechanism must name every field")
            return Spend(words("run", node.pop("run")), mechanism, words("note", node.pop("note")))
        if kind == "torn":
            torn = Torn(**node)
            checked(Step(torn.run, 0, "", "", *torn[1:4], None, *torn[4:], int(torn.sampling == CYCLIC)))
            return torn
        raise ValueError(f"its kind {kind!r:.40} is not known")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{place} is no entry of a ledger: {' '.join(str(error).split())}") from None
