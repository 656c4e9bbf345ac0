"""The records of soundness.py: read back from its file, and summed up for a person."""

import collections
import json
import statistics

import numpy as np


def done_before(path):
    """Return the records in the whole lines of the file, and remove an unfinished last line from the file."""
    if not path.exists():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


def report_attack(records):
    tally = collections.Counter()
    for record in records:
        tally.update(record["tally"])
    false, raised, contradictions = (
        [x for record in records for x in record[name]] for name in ("false", "raised", "contradictions")
    )
    total = sum(tally.values())
    print(
        f"answers {total}  false {len(false)}  raised {len(raised)}  contradictions seen and voided "
        f"{len(contradictions)}  seconds {sum(r['seconds'] for r in records):.0f}"
    )
    for name, count in tally.most_common():
        print(f"  {name:32s} {count:8d}")
    for title, column in (("decade of noise", 0), ("decade of epsilon", 1)):
        groups = collections.defaultdict(list)
        for record in records:
            for row in record["widths"]:
                groups[row[column]].append(row[2])
        print(f"median relative width by {title}:")
        order = sorted(groups, key=lambda x: float(x) if x != "inf" else np.inf)
        print("  " + ", ".join(f"{x}: {statistics.median(groups[x]):.1e} ({len(groups[x])})" for x in order))
    for line in (false + raised + contradictions)[:40]:
        print("  !", line)


def report_verified(records):
    for kind in sorted({r["kind"] for r in records}):
        mine = [r for r in records if r["kind"] == kind]
        tally = collections.Counter(r["status"] for r in mine)
        moved = collections.Counter(x for r in mine for x in r.get("moved", []))
        width = statistics.median([(r["upper"] - r["lower"]) / r["upper"] if r["upper"] else 0.0 for r in mine])
        print(
            f"{kind:18s} {dict(tally)}  undecided {tally['undecided'] / len(mine):.1%}  moved by 1e-4: {dict(moved)}  "
            f"median digits {statistics.median(r['digits'] for r in mine)}  width {width:.1e}  "
            f"seconds {sum(r['seconds'] for r in mine):.0f}"
        )
    for record in records:
        if record["status"] == "refuted" or "verified" in record.get("moved", []):
            print("  !", {k: v for k, v in record.items() if k != "block"})
