"""The two dictionaries of this example, read from the files of Debian's packages, and words as numbers.

Private: the glosses of WordNet 3.0 (package wordnet-base), each with its lexicographer file as class.
Public: the definitions of GCIDE (package dict-gcide) without every entry that mentions WordNet.
"""

import collections
import gzip
import pathlib
import re
from dataclasses import dataclass

import numpy as np

WORDNET = "usr/share/wordnet"
GCIDE = "usr/share/dictd/gcide.dict.dz"
MISSING = (
    "{path} is missing; run `apt-get install wordnet-base dict-gcide`, or `apt-get download wordnet-base dict-gcide`, "
    "`dpkg -x FILE.deb FOLDER` for both files, and --data FOLDER"
)
CLASSES = 45
"""WordNet's lexicographer files, numbered 0 to 44: noun.animal, verb.motion, ..."""
LENGTH = 16
"""Words of a definition that are read; later ones are left out."""
PAD, UNKNOWN, MASK = 0, 1, 2
FIRST = 3
"""Numbers smaller than FIRST stand for no word."""


class MissingData(Exception):
    """A file of the packages is not there; the message says what to install."""


@dataclass(frozen=True)
class Definition:
    """One sense of a word in GCIDE."""

    headword: str
    part: str
    """Part of speech as printed: n., v. t., a., ..."""
    field: str
    """Subject as printed, without brackets: Zool., Bot., ...; empty where there is none."""
    text: str


# WordNet


def glosses(lines):
    """(texts, classes) of the lines of a data file of WordNet (wndb(5WN)); examples in quotation marks are left out.

    A line of a synset begins with its offset and the number of its lexicographer file; its gloss follows "|".
    Lines of the licence begin with two blanks.
    """
    texts, classes = [], []
    for line in lines:
        if line.startswith("  ") or "|" not in line:
            continue
        fields, gloss = line.split("|", 1)
        texts.append(gloss.split('"', 1)[0].strip(" ;\n"))
        classes.append(int(fields.split()[1]))
    return texts, np.array(classes, np.int32)


def read_glosses(folder):
    """(texts, classes) of all of WordNet, in the order noun, verb, adjective, adverb."""
    texts, classes = [], []
    for name in ("noun", "verb", "adj", "adv"):
        with _there(folder, f"{WORDNET}/data.{name}").open(encoding="utf-8") as file:
            found = glosses(file)
        texts += found[0]
        classes.append(found[1])
    return texts, np.concatenate(classes)


# GCIDE

_ACCENT = re.compile(r"\[[\"'`^=~:.,*]{0,2}([A-Za-z]{1,2})[\"'`^=~:]?\]")
"""An accented letter or ligature: [ae], [=a], [\\'e]."""
_BRACKETS = re.compile(r"\[[^\[\]]*\]")
"""Etymologies, usage and sources."""
_PART = re.compile(r"(?:prop\. )?(?:n|v|a|adv|prep|pron|conj|interj|p)\.(?: (?:t|i|p|a|pl)\.)*")
_BEGINS = re.compile(r"\n   (?=(?:\d+\. )?(?:\([^()]*\) *)*[A-Z][a-z]*[ ,;])")
"""Where the first sense begins: at a line that starts with a capital, after an optional number and parentheses."""
_FIELD = re.compile(r"\(([A-Z][A-Za-z. &]*\.)\)")
_QUOTED = re.compile(r'; as[,:].*|"[^"]*".*| --.*|\b[Ss]ee (?:under )?\{.*')
"""What follows a definition: examples, quotations, names of authors, references."""


def definitions(block):
    """The senses of one entry of GCIDE, which begins with its headword; none where the entry mentions WordNet.

    Notes, synonyms, compounds and quotations are left out.
    """
    if "wordnet" in block.lower() or block.startswith("00-"):
        return []
    head, _, rest = block.partition("\\")
    _, pronounced, rest = rest.partition("\\")
    if not pronounced or "\n" in head:
        return []
    rest = _ACCENT.sub(r"\1", rest)
    while (shorter := _BRACKETS.sub("", rest)) != rest:
        rest = shorter
    begins = _BEGINS.search(rest)
    part = _PART.search(rest)
    if begins is None or part is None or part.start() > begins.start():
        return []
    fields = _FIELD.findall(rest[: begins.start()].replace("\n  ", ""))
    senses = []
    for paragraph in re.split(r"\n\s*\n", rest[begins.start() :].strip("\n")):
        if not re.match(r"   (?!Note:|Syn:|\{|\s)", paragraph):
            continue
        joined = re.sub(r"\s+", " ", paragraph).strip()
        own = _FIELD.findall(joined)
        text = _QUOTED.sub("", re.sub(r"^\d+\. |\([^()]*\)", "", joined)).strip()
        if len(words(text)) >= 2:
            senses.append(Definition(head.strip(), part[0], (own or fields or [""])[0], text))
    return senses


def read_definitions(folder):
    """All public definitions, in the order of the file."""
    with gzip.open(_there(folder, GCIDE), "rt", encoding="utf-8", errors="replace") as file:
        text = file.read()
    return [sense for block in re.split(r"\n(?=\S)", text) for sense in definitions(block)]


def _there(folder, name):
    path = pathlib.Path(folder) / name
    if not path.is_file():
        raise MissingData(MISSING.format(path=path))
    return path


# Words as numbers


def words(text):
    """Words in small letters, without punctuation."""
    return re.findall(r"[a-z]+(?:'[a-z]+)?", text.lower())


@dataclass(frozen=True)
class Vocabulary:
    """The most frequent words and endings of *public* texts.  A word that is not in it is read as its longest ending.

    A vocabulary made from private texts would tell which words they hold.
    """

    numbers: dict
    """The number of each word, and of each ending, which is written with a hyphen in front."""

    @classmethod
    def of(cls, texts, size=8192, endings=1024):
        """A vocabulary of `size` numbers, `endings` of them for the commonest endings (2-5 letters) of rarer words."""
        counts = collections.Counter(word for text in texts for word in words(text))
        ranked = [word for word, _ in counts.most_common()]
        frequent, rare = ranked[: size - endings - FIRST], ranked[size - endings - FIRST :]
        ends = collections.Counter(
            "-" + w[-n:] for w in rare for n in range(2, 6) if len(w) > n for _ in range(counts[w])
        )
        known = frequent + [end for end, _ in ends.most_common(endings)]
        return cls({word: FIRST + place for place, word in enumerate(known)})

    def __len__(self):
        return FIRST + len(self.numbers)

    def number(self, word):
        """The number of the word, else of its longest known ending, else UNKNOWN."""
        names = [word] + ["-" + word[-n:] for n in range(5, 1, -1) if len(word) > n]
        return next((self.numbers[name] for name in names if name in self.numbers), UNKNOWN)

    def encode(self, texts, length=LENGTH):
        """(len(texts), length) numbers; short texts are followed by PAD.  A text without words is one UNKNOWN."""
        cache, coded = {}, np.full((len(texts), length), PAD, np.int32)
        for row, text in enumerate(texts):
            found = words(text)[:length]
            for place, word in enumerate(found):
                if word not in cache:
                    cache[word] = self.number(word)
                coded[row, place] = cache[word]
            if not found:
                coded[row, 0] = UNKNOWN
        return coded
