"""List words and phrases that the project no longer uses, with their replacements.

    python tools/retired_words.py              # every tracked file; exit code 1 if a word is found
    python tools/retired_words.py docs src     # some files or folders
    python tools/retired_words.py --counts     # hits per folder

Names that cannot change (metrics, JSON keys, values of settings) are listed in KEPT. A line that holds another such
name is skipped if it ends with a comment that contains "kept name".
"""

import argparse
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
# A pattern, without regard to case, and what to write instead.
RETIRED = {
    r"pictures?": "image",
    r"\bno numbers?\b": "NaN or Inf",
    r"\bnot a number\b": "NaN or Inf",
    r"\b(?:told|tells)\b": "reported, logged, printed, listed",
    r"\btell\b": "report, log, print, list",
    r"\bsaid\b": "result, output, stated, reported",
    r"\bspeaks?\b": "prints, supports",
    r"\bspoken\b": "printed",
    r"\bas ever\b": "as before, or leave it out",
    r"\bof ours\b": "our, this project's",
    r"\bof timm's\b": "timm, a timm model",
    r"\balike\b": "in the same way, both",
    r"\b(?:one|two|three) an? (?:stage|class|group|process|image|GPU|line|run|task|colour)\b": "per",
    r"\bleast score\b": "score threshold, min_score",
    r"\bby heart\b": "overfit, overfitting",
    r"\bgo(?:es|ing)? on (?:from|where|with|by|in|bit-equal)\b": "resume, continue",
    r"\bbroken[- ]off\b": "incomplete, interrupted",
    r"\bbegun\b": "started, incomplete",
    r"\bin vain\b": "to no effect",
    r"\blooked into\b": "inspected",
    r"\bmakes? of (?:it|each|them|the)\b": "computes from",
    r"\basked were\b": "the target was",
    r"\bin the box\b": "included in the package",
    r"\bMOST_|(?<!at)_most\b|\bmost_": "MAX_, max_",
    r"\bLEAST_|(?<!at)_least\b|\bleast_": "MIN_, min_",
}
# Public names, metrics and values of settings. They are removed from a line before it is searched.
KEPT = re.compile(
    "|".join(
        (
            r"pale_(?:batch|queue)_pictures\w*",
            r"on_device[`\"']?[:= ]+[`\"']?pictures\b",
            r"most_of_one_class",
            r"\.tell\b",
            r"[\"']pictures?[\"']",  # keys of JSON and CSV
        )
    )
)
SKIPPED = re.compile(
    r"^(CHANGELOG\.md|LICENSE|tools/retired_words\.py|tests/.*test_retired_words\.py)$"
    r"|^tests/golden/|\.(json|jsonl|yaml|csv|lock)$"
)
PATTERN = re.compile("|".join(f"({pattern})" for pattern in RETIRED), re.IGNORECASE)
REPLACEMENTS = list(RETIRED.values())


def find(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line number, word and replacement of every retired word in a text."""
    for number, line in enumerate(text.splitlines(), 1):
        if "kept name" in line:
            continue
        for match in PATTERN.finditer(KEPT.sub("", line)):
            yield number, match.group(), REPLACEMENTS[(match.lastindex or 1) - 1]


def tracked(paths: list[str]) -> Iterator[str]:
    """Yield the tracked text files below `paths`, all if empty."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "--", *paths], cwd=ROOT, capture_output=True, check=True
    )
    for name in done.stdout.decode().split("\0"):
        path = ROOT / name
        if name and not SKIPPED.search(name) and path.is_file() and not path.is_symlink():
            yield name


def main() -> int:
    """Print every hit, or the number of hits per folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("paths", nargs="*", help="files or folders (default: all tracked files)")
    parser.add_argument("--counts", action="store_true", help="print the number of hits per folder")
    args = parser.parse_args()
    counts: Counter[str] = Counter()
    for name in tracked(args.paths):
        try:
            text = (ROOT / name).read_text()
        except UnicodeDecodeError:
            continue
        for number, word, replacement in find(text):
            parts = Path(name).parts
            counts["/".join(parts[: min(3, len(parts) - 1)]) or "."] += 1
            if not args.counts:
                print(f"{name}:{number}: {word!r}: write {replacement}")
    for folder, count in sorted(counts.items()) if args.counts else ():
        print(f"{count:6d}  {folder}")
    if counts:
        print(f"{sum(counts.values())} retired words", file=sys.stderr)
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main())
