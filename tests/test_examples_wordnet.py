"""The WordNet example: parsers on invented entries, words, the message for missing data, a tiny run of every way."""

import csv
import gzip
import importlib
import math
import pathlib
import sys

import numpy as np
import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "examples" / "wordnet_lora"

SYNSETS = """\
  1 This line stands for the licence | and is no synset
00000001 05 n 02 zorb 0 zorbling 0 001 @ 00000002 n 0000 | a small animal; lives in (warm) water; "it swam"; "they eat"
00000002 43 v 01 zorbify 0 001 * 00000001 v 0000 01 + 02 00 | become like a zorb
"""

ENTRIES = r"""

00-database-short
   An invented dictionary \with a backslash\, n.
   1. This is about the dictionary.

Zorb \Zorb\ (z[^o]rb), n.; pl. {Zorbs}. [OE. zorbe, from a
   Saxon word. See {Zorbling}.] (Zo["o]l.)
   1. A small round animal of the family {Zorbid[ae]}; as, the
      red zorb. "A zorb, a zorb!" --Somebody.
      [1913 Webster]

            My kingdom for a zorb.                --Somebody.
      [1913 Webster]

   2. (Her.) A round figure upon a shield.
      [Obs.]
      [1913 Webster]

   Note: Zorbs are invented.

   Syn: Ball; globe.

   {Water zorb}, a zorb that swims.
      [1913 Webster]

Zorbify \Zorb"i*fy\, v. t. [{Zorb} + -fy.]
   To make round. -- {Zorb"i*fi`er}, n.
   [1913 Webster]

Zorbless \Zorb"less\, a.
   Without any zorbs at all.
   [WordNet 1.5]

Zorbdom \Zorb"dom\, n.
   All zorbs together.
   [PJC]

   2. A place full of zorbs.
      [1913 Webster + WordNet 1.5]

See \See\, n.
   Sea.
   [1913 Webster]
"""


def write(path, text):
    """Write a file, compressed if its name ends in .dz, and create its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".dz" else text.encode())


@pytest.fixture(scope="module")
def example():
    """(dictionaries, encoder, wordnet_lora), with their folder on the path as when the script is run."""
    pytest.importorskip("flax")
    names = "dictionaries", "encoder", "wordnet_lora", "correlated_noise"
    sys.path.insert(0, str(FOLDER))
    try:
        yield tuple(importlib.import_module(name) for name in names[:3])
    finally:
        sys.path.remove(str(FOLDER))
        for name in names:
            sys.modules.pop(name, None)


def test_glosses_without_examples(example):
    dictionaries, _, _ = example
    texts, classes = dictionaries.glosses(SYNSETS.splitlines(keepends=True))
    assert texts == ["a small animal; lives in (warm) water", "become like a zorb"]
    assert classes.tolist() == [5, 43]


def test_definitions_without_what_is_around_them(example, tmp_path):
    dictionaries, _, _ = example
    write(tmp_path / dictionaries.GCIDE, ENTRIES)
    assert dictionaries.read_definitions(tmp_path) == [
        dictionaries.Definition("Zorb", "n.", "Zool.", "A small round animal of the family {Zorbidae}"),
        dictionaries.Definition("Zorb", "n.", "Her.", "A round figure upon a shield."),
        dictionaries.Definition("Zorbify", "v. t.", "", "To make round."),
    ]


@pytest.mark.parametrize("tag", ["WordNet 1.5", "1913 Webster + WordNet 1.5", "PJC, from wordnet"])
def test_an_entry_that_mentions_wordnet_is_left_out_whole(example, tag):
    dictionaries, _, _ = example
    entry = (
        "Zorb \\Zorb\\, n.\n   1. A small round animal.\n      [1913 Webster]\n\n   2. A round figure.\n      [%s]\n"
    )
    assert dictionaries.definitions(entry % tag) == []
    assert len(dictionaries.definitions(entry % "1913 Webster")) == 2


def test_words_of_the_public_text_alone(example):
    dictionaries, _, _ = example
    public = ["the zorb, the Zorb's sea", "the sea of zorbs", "swimming diving"]
    vocabulary = dictionaries.Vocabulary.of(public, size=9, endings=3)
    assert len(vocabulary) == 9 and list(vocabulary.numbers)[:2] == ["the", "sea"]
    the, sea = vocabulary.numbers["the"], vocabulary.numbers["sea"]
    ending = vocabulary.numbers["-ing"]
    coded = vocabulary.encode(["The secret sea", "running", "?", "the " * 30], length=4)
    assert coded.tolist() == [
        [the, dictionaries.UNKNOWN, sea, dictionaries.PAD],
        [ending, 0, 0, 0],
        [dictionaries.UNKNOWN, 0, 0, 0],
        [the] * 4,
    ]


def test_without_the_packages_it_says_what_to_install(example, tmp_path):
    _, _, script = example
    with pytest.raises(SystemExit) as stopped:
        script.main(["--data", str(tmp_path), "--out", str(tmp_path)])
    told = stopped.value.code  # a text: Python prints it and exits with 1
    assert "\n" not in told and "apt-get install wordnet-base dict-gcide" in told and "--data FOLDER" in told
    assert list(tmp_path.iterdir()) == []


def invented(folder, dictionaries):
    """Write two small dictionaries in the packages' form: 64 public definitions, and 64 glosses of eight classes."""
    things, deeds = ("round", "flat", "wet", "dry"), ("sea", "hill", "moon", "fire")
    pairs = [(thing, deed) for thing in things for deed in deeds]
    entry = "{0}{1} \\{0}{1}\\, n. (Zool.)\n   A {0} animal of the {1}.\n   [1913 Webster]\n"
    write(folder / dictionaries.GCIDE, "\n\n" + "\n".join(entry.format(*pair) for pair in pairs * 4))
    for first, name in enumerate(("noun", "verb", "adj", "adv")):
        lines = [
            f"{n:08} {first + 10 * (t == 'wet'):02} n 01 w 0 000 | a {t} {d}  \n" for n, (t, d) in enumerate(pairs)
        ]
        write(folder / f"{dictionaries.WORDNET}/data.{name}", "  1 licence | of none\n" + "".join(lines))


@pytest.mark.slow
def test_every_way_runs_once_and_spends_what_it_says(example, tmp_path, monkeypatch, capsys):
    dictionaries, encoder, script = example
    pytest.importorskip("matplotlib")
    invented(tmp_path, dictionaries)
    monkeypatch.setattr(encoder, "LAYERS", 1)
    monkeypatch.setattr(script, "BATCH", 16)
    asked = f"--data {tmp_path} --cache {tmp_path}/cache --out {tmp_path} --epsilon 8 --steps 3 --pretraining-steps 6"
    script.main(asked.split())
    with (tmp_path / "wordnet_lora.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["way"], float(row["epsilon"])) for row in rows] == [
        ("lora", 8.0),
        ("full", 8.0),
        ("random", 8.0),
        ("open", math.inf),
    ]
    for row in rows:
        assert 0.0 <= float(row["accuracy"]) <= 1.0
        assert row["way"] == "open" or 0.99 * float(row["epsilon"]) < float(row["epsilon_spent"]) <= float(
            row["epsilon"]
        )
    sizes = [int(row["trained_parameters"]) for row in rows]
    assert sizes[0] == sizes[2] == sizes[3] < sizes[1] / 2
    assert (tmp_path / "wordnet_lora.png").stat().st_size > 10_000
    capsys.readouterr()
    script.main(asked.split())  # weights come from the cache, rows from the file
    with (tmp_path / "wordnet_lora.csv").open() as file:
        assert list(csv.DictReader(file)) == rows
    assert "pre-training" not in capsys.readouterr().out


@pytest.mark.slow
def test_noise_that_steps_share_runs_at_the_same_epsilon(example, tmp_path, monkeypatch):
    dictionaries, encoder, _ = example
    pytest.importorskip("matplotlib")
    invented(tmp_path, dictionaries)
    monkeypatch.setattr(encoder, "LAYERS", 1)
    script = importlib.import_module("correlated_noise")
    monkeypatch.setattr(script, "BATCH", 16)
    asked = f"--data {tmp_path} --cache {tmp_path}/cache --out {tmp_path} --epsilon 8 --steps 4 --pretraining-steps 6"
    script.main([*asked.split(), "--runs", "1", "--optimizers", "momentum", "--rates", "1", "--bands", "2"])
    with (tmp_path / "correlated_noise.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["way"] for row in rows] == list(script.WAYS)
    assert all(7.9 < float(row["epsilon_spent"]) <= 8.0 for row in rows)
    assert (tmp_path / "correlated_noise.png").stat().st_size > 10_000


@pytest.mark.slow
def test_lora_begins_at_the_pretrained_weights(example):
    """Every way but "random" begins with the pretrained encoder, since LoRA changes nothing before the first step."""
    import jax.numpy as jnp

    dictionaries, encoder, script = example
    weights = encoder.initial(10, seed=1)
    numbers = jnp.array([4, 5, 6] + [dictionaries.PAD] * (dictionaries.LENGTH - 3))
    state_of = lambda params: encoder.Encoder(10).apply({"params": script.plain(params)}, numbers)[2]
    begin = {way: state_of(script.starting_point(way, weights, range(10), seed=2)) for way in script.WAYS}
    for way in ("lora", "full", "open"):
        np.testing.assert_allclose(begin[way], state_of(weights), rtol=1e-6)
    assert not np.allclose(begin["random"], begin["lora"], rtol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("private", [True, False])
def test_only_lora_and_the_head_move(example, monkeypatch, private):
    import jax

    dictionaries, encoder, script = example
    monkeypatch.setattr(script, "BATCH", 16)
    numbers = np.full((64, dictionaries.LENGTH), 5, np.int32)
    train = numbers, np.arange(64, dtype=np.int32) % dictionaries.CLASSES
    begin = script.starting_point("lora", encoder.initial(10, seed=1), range(10), seed=2)
    if private:
        end = script.tune_privately(begin, 8.0, train, 3, 1e-2, 1.0, progress=False)[1].params
    else:
        end = script.tune_openly(begin, train, 3, 1e-2, seed=3, progress=False)
    differs = lambda a, b: bool(np.any(np.asarray(a) != np.asarray(b)))
    moved = jax.tree.map(differs, end.base, begin.base)
    assert all(jax.tree.leaves(moved.pop("head"))) and not any(jax.tree.leaves(moved))
    assert all(jax.tree.leaves(jax.tree.map(differs, end.adapters, begin.adapters)))
