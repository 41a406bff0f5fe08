"""Print what setup.cfg requires, for a layer of dependencies without the code.

python launch/requirements.py [EXTRA…] [--dry-run]
"""

import configparser
import sys


def requirements(extras: list[str], path: str = "setup.cfg") -> list[str]:
    """The requirements of the package and of some of its extras; KeyError names an extra that is not there."""
    parser = configparser.ConfigParser()
    parser.read(path, encoding="utf-8")
    texts = [parser["options"]["install_requires"]]
    texts += [parser["options.extras_require"][extra] for extra in extras]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


if __name__ == "__main__":
    print("\n".join(requirements([name for name in sys.argv[1:] if name != "--dry-run"])))
