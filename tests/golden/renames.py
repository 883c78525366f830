"""Deliberate renames since the golden files were written: lines (old, new), and nothing else.

The golden files keep the old names. Before a comparison each new name found today is translated back to the old one:

- OPTIONS: an option string or a dest, with its command: ("pale eval --batch-size", "pale eval --batch"); or without,
  for every command that has it.
- JSON_KEYS: a key of JSON that is printed or written, wherever it stands: ("picture", "image"); or one place by its
  path, with [] for lists: ("classes[].share", "classes[].percent").
- SETTINGS: a dotted settings path, in every recipe; what lies below it follows: ("optim.clip", "optim.max_norm").
- STATE_DICT: a dotted part of a state-dict key, at its beginning, middle or end: ("blocks.0", "layers.0");
  the files of an earlier version must load all the same.
- PUBLIC: a name in `pale.__all__`, a method of a public class, or a parameter: ("picture", "image").
- RECIPES: the name of a recipe.
- COMMANDS: a whole command: ("pale data coco", "pale data convert").

Lines that have been released stay, as they are what a user of an old version has to change.
"""

Table = tuple[tuple[str, str], ...]

OPTIONS: Table = (
    ("pale predict pictures", "pale predict inputs"),
)  # a positional, so no call changes
JSON_KEYS: Table = ()
SETTINGS: Table = ()
STATE_DICT: Table = ()
PUBLIC: Table = (("pictures", "images"), ("picture", "image"), ("seen", "prepared"))
RECIPES: Table = ()
COMMANDS: Table = ()


def old(name: str, table: Table, where: str = "") -> str:
    """Return the old name of what is called `name` today; lines of the table may begin with `where`."""
    for before, now in table:
        if now == name:
            return before
        if where and now == f"{where} {name}":
            return before.removeprefix(f"{where} ")
    return name


def old_dotted(name: str, table: Table) -> str:
    """Return the old form of a dotted name, any whole part of which may have been renamed."""
    dotted = f".{name}."
    for before, now in table:
        dotted = dotted.replace(f".{now}.", f".{before}.")
    return dotted[1:-1]


def old_path(path: str, table: Table) -> str:
    """Return the old form of a path of JSON keys, "classes[].share"."""
    for before, now in table:
        if path == now or path.startswith((f"{now}.", f"{now}[")):
            path = before + path[len(now) :]
    return path


def old_words(name: str, table: Table) -> str:
    """Return the old form of a command: "pale data check"."""
    for before, now in table:
        if name == now or name.startswith(f"{now} "):
            return before + name[len(now) :]
    return name
