"""Derives keys such that a repeated step has the same result to the last bit, or new randomness (README.md, "Keys")."""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import os
import platform
import re
import secrets
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from jaxacct.core.validation import InputError
from jaxacct.engines.devices import cores
from jaxacct.training.clipping.traces import contents, words_of

_VARIABLES = re.compile(
    r"(XLA|LIBTPU|TPU|CUDA|CUDNN|CUBLAS|NVIDIA|NCCL|HIP|ROC|HSA|TF|PJRT|OMP|KMP|MKL|ONEDNN|DNNL|OPENBLAS|EIGEN|NPROC|LD_)"
)
"""Prefixes of the names of environment variables that compilers and numerical libraries read."""
_HARMLESS = re.compile(
    r"jax_(numpy_(rank|dtype)_promotion$|.*compilation_cache|persistent_cache|raise_persistent|explain_cache|log|.*dump|"
    r"traceback|.*traceback|tracer_error|pprint|debug_(key_reuse|log|leaked)|check_(tracer|proxy)|enable_checks$|"
    r"thread_guard$|captured_constants|hlo_source_file|compiler_detailed|.*timeout|platforms$|platform_name$)"
)
"""JAX settings left out of the digest.  They change no result, or change it through the program, which is digested."""


class Secret:
    """Value that stays in this process: pickle and repr leave it out, and a copy is the same object."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<secret>"

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    def __deepcopy__(self, _: Any) -> Self:
        return self

    def __copy__(self) -> Self:
        return self


class Root(Secret):
    """Secret key of a run; whoever has it can remove the run's noise.  Pickle and repr leave the key out."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key

    @property
    def key(self) -> bytes:
        """The key's 32 bytes; raises InputError if pickling left them out."""
        if self._key is None:
            raise InputError("state has no secret key, which pickling leaves out; give checkpoints=")
        return self._key

    @property
    def known(self) -> bool:
        """Whether the object has its key; an unpickled object has none."""
        return self._key is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Root) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class Lineage(Secret):
    """Origin of a run's randomness: the secret root, and digests of all that led to the present step.

    It is no tuple and no dataclass, since JSON, `asdict` and others would write the fields of one as they are.
    """

    __slots__ = ("chain", "pass_chain", "pass_cut", "pass_first", "root", "seal")
    root: Root
    chain: bytes  # a digest of the root and of all states, programs, data and settings of the run so far
    seal: bytes  # a digest of the state to which `chain` has led; b"" if nobody has computed this digest
    pass_first: int  # the first step of the current pass over the data
    pass_chain: bytes  # the chain before step `pass_first`
    pass_cut: bytes  # the argument `cut` that `advance` got in the current pass

    def __new__(
        cls, root: Root, chain: bytes, seal: bytes, pass_first: int, pass_chain: bytes, pass_cut: bytes = b""
    ) -> Self:
        self = super().__new__(cls)
        self.root, self.chain, self.seal = root, chain, seal
        self.pass_first, self.pass_chain, self.pass_cut = pass_first, pass_chain, pass_cut
        return self

    def fields(self) -> dict[str, Any]:
        """Return the fields by their names, as `__new__` takes them.  They are secret."""
        return {name: getattr(self, name) for name in self.__slots__}

    def replace(self, **changes: Any) -> Lineage:
        """Return a lineage with other values of some fields."""
        return Lineage(**self.fields() | changes)

    def hidden(self) -> Lineage:
        """Return what pickle writes.  By plain digests, or two links of the chain, a reader could test guessed data."""
        if not self.root.known:
            return self
        own = digest(self.chain, self.seal, b"%d" % self.pass_first, self.pass_chain, self.pass_cut)
        return Lineage(Root(), hmac.digest(self.root.key, b"pickled" + own, "sha256"), b"", self.pass_first, b"")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lineage) and self.fields() == other.fields()

    def __hash__(self) -> int:
        return hash(self.chain)

    def __reduce__(self) -> tuple[Any, ...]:
        line = self.hidden()
        return Lineage, (line.root, line.chain, line.seal, line.pass_first, line.pass_chain, line.pass_cut)


class StepKey(NamedTuple):
    """Keys of a step and of its pass, as ChaCha20 words, and the fingerprints that the ledger records."""

    words: np.ndarray
    pass_words: np.ndarray
    key_fingerprint: str
    batch_fingerprint: str
    partition: str


def begin(root: bytes) -> Lineage:
    """Return the lineage before a run's first step.  Its chain is a digest of the secret root, and reveals no data."""
    return Lineage(Root(root), digest(b"begin", root), b"", -1, b"")


def joined(lineage: Lineage, seal: bytes) -> Lineage:
    """Return the lineage extended by a state's digest `seal`, or unchanged if the lineage led to exactly this state."""
    if seal == lineage.seal:
        return lineage
    return lineage.replace(chain=digest(lineage.chain, b"state", seal), seal=seal, pass_first=-1)


def advance(
    lineage: Lineage,
    program: bytes,
    data: bytes,
    settings: tuple[Any, ...],
    first: int,  # the first step of the pass that this step is in; -1 if the batch rule has no passes
    cut: bytes = b"",  # a step with other bytes than the step before begins a new pass
    groups: int | None = None,  # the number of groups, or of batches in a fixed order
) -> tuple[Lineage, StepKey]:
    """Return the lineage after a step, and the step's keys.  All programs, data and settings so far decide `words`."""
    if first >= 0 and (first, cut) != (lineage.pass_first, lineage.pass_cut):
        lineage = lineage.replace(pass_first=first, pass_chain=lineage.chain, pass_cut=cut)
    chain = digest(lineage.chain, program, data, repr(settings).encode())
    lineage = lineage.replace(chain=chain, seal=b"")  # the old seal belongs to the state before this step
    secret = hmac.digest(lineage.root.key, b"step" + chain, "sha256")
    of_pass = hmac.digest(lineage.root.key, b"pass" + digest(lineage.pass_chain, data, cut), "sha256")
    label = of_pass
    if groups is not None:  # one key for the whole run, so that each record keeps its group or batch
        of_pass = hmac.digest(lineage.root.key, b"groups %d" % groups, "sha256")
        label = hmac.digest(lineage.root.key, b"pass %d of groups %d" % (first, groups), "sha256")
    batch = hmac.digest(secret, b"batch" + data, "sha256")
    return lineage, StepKey(
        _words(secret), _words(of_pass), _fingerprint(secret), _fingerprint(batch), _fingerprint(label)
    )


def loaded(lineage: Lineage, key: StepKey, rows: bytes) -> tuple[Lineage, StepKey]:
    """Return the lineage with a keyed digest of the loaded batch, and the keys with new `words` for later draws."""
    own = hmac.digest(lineage.root.key, b"rows" + digest(lineage.chain, rows), "sha256")
    chain = digest(lineage.chain, b"loaded", own)
    secret = hmac.digest(lineage.root.key, b"loaded" + chain, "sha256")
    return lineage.replace(chain=chain), key._replace(words=_words(secret), key_fingerprint=_fingerprint(secret))


def anew(lineage: Lineage, bits: bytes) -> Lineage:
    """Return the lineage extended by fresh random bits.  Later steps begin a new pass and repeat no earlier draw."""
    return lineage.replace(chain=digest(lineage.chain, b"anew", bits), pass_first=-1)


def digest(*parts: bytes | memoryview) -> bytes:
    """Return the SHA-256 digest of several byte strings, each preceded by its length."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.digest()


def digest_tree(tree: Any) -> bytes:
    """Return the SHA-256 digest of a pytree: of its structure, and of the shape, dtype and bits of each leaf."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    parts: list[bytes | memoryview] = [form_of(structure)]
    for leaf in leaves:
        array = np.asarray(words_of(leaf))
        parts += [f"{array.dtype} {array.shape}".encode(), np.ascontiguousarray(array).reshape(-1).view(np.uint8).data]
    return digest(*parts)


def form_of(structure: Any) -> bytes:
    """Return a pytree's structure as text that is the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(structure)).encode()


def digest_program(traced: Any) -> bytes:
    """Return one SHA-256 digest of a traced function and this machine.  Equal digests mean bitwise equal outputs."""
    constants, primitives = contents(traced.jaxpr)
    own = b"" if repeats(primitives) else secrets.token_bytes(16)
    return digest(traced.lower().as_text().encode(), digest_tree(constants), machine().encode(), own)


def _words(secret: bytes) -> np.ndarray:
    """Return the eight uint32 words of a ChaCha20 key, read from its 32 bytes as little-endian."""
    return np.frombuffer(secret, "<u4").astype(np.uint32)


def _fingerprint(secret: bytes) -> str:
    """Return 128 bits of a key's digest as text; these bits reveal nothing about the key."""
    return digest(b"fingerprint", secret).hex()[:32]


def machine() -> str:
    """Return a text that describes this machine.  Machines with equal texts compute equal bits from one program."""
    settings = {name: repr(value) for name, value in jax.config.values.items() if not _HARMLESS.match(name)}
    flags = {name: value for name, value in os.environ.items() if _VARIABLES.match(name)}
    devices = jax.devices()
    told = {
        "libraries": _libraries(),
        "devices": [f"{device.platform} {device.device_kind}" for device in devices],
        "backend": devices[0].client.platform_version,
        "processor": _processor(),
        "threads": cores(),
        "flags": flags,
        "settings": settings,
    }
    return json.dumps(told, sort_keys=True)


def repeats(primitives: set[str]) -> bool:
    """Return whether a program made of these `primitives` gives the same bits each time it runs on this machine."""
    # these operations may give different results for the same arguments
    if primitives & {"pure_callback", "io_callback", "ffi_call", "infeed", "rng_uniform"}:
        return False
    if jax.devices()[0].platform in ("cpu", "tpu"):
        return True
    # these operations sum over devices, in an order that may change from call to call
    if primitives & {"psum", "psum_invariant", "reduce_scatter", "psum_scatter"}:
        return False
    # these flags make GPUs add in the same order every time
    flag = r"--xla_gpu_(?:deterministic_ops|exclude_nondeterministic_ops)(?:=(\S+))?"
    asked = re.findall(flag, os.environ.get("XLA_FLAGS", ""))
    return bool(asked) and asked[-1].lower() in ("", "true", "1")


@functools.cache
def _libraries() -> dict[str, str]:
    """Return the versions of the packages whose code runs in a step, and of the C library."""
    known: dict[str, str] = {}
    for each in distributions():
        name = (each.metadata["Name"] or "").lower()
        if name.startswith(("jax", "libtpu", "nvidia-", "rocm")):
            known[name] = each.version
    import jaxlib

    return known | {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "libc": " ".join(platform.libc_ver())}


@functools.cache
def _processor() -> list[Any]:
    """Return the kind, instruction sets and caches of the processors.  They decide how libraries order their sums."""
    cores = set()
    # leave out the fields that differ from one reading to the next, or between the cores of one machine
    varying = {"processor", "cpu mhz", "bogomips", "apicid", "initial apicid", "core id", "physical id", "bugs"}
    try:
        for block in Path("/proc/cpuinfo").read_text().strip().split("\n\n"):
            rows = [line.partition(":")[::2] for line in block.splitlines()]
            cores.add("\n".join(f"{k.strip()}:{v.strip()}" for k, v in rows if k.strip().lower() not in varying))
        caches = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
        sizes = [path.read_text().strip() for path in caches]
    except OSError:
        sizes = []
    return [platform.system(), platform.machine(), platform.processor(), sorted(cores), sizes]
