"""Fill the ${NAME}s of a manifest in, and check manifests against the schemas of Kubernetes.

python launch/render.py launch/jobset.yaml NAME=run IMAGE=… | kubectl apply -f -
python launch/render.py launch/jobset.yaml NAME=run … --dry-run     the same, and where each value went
python launch/render.py --check launch/*.yaml                       with made-up values (make lint)
"""

from __future__ import annotations

import re
import string
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

#: Values that `--check` fills in: numbers where a number must stand.
NUMBERS = {"HOSTS", "CHIPS", "REPLICAS", "CPUS", "MEMORY_GIB"}
KUBERNETES = "1.31"


def names(template: str) -> list[str]:
    """The values that a manifest asks for. Comments do not ask."""
    code = "\n".join(line for line in template.splitlines() if not line.lstrip().startswith("#"))
    return sorted(set(re.findall(r"\$\{(\w+)\}", code)))


def render(template: str, values: Mapping[str, str]) -> str:
    """The manifest with its values.

    Raises:
      SystemExit: a value is missing, unknown, or would be something else in YAML than the one word it stands for.
    """
    wanted = names(template)
    missing, unknown = sorted(set(wanted) - set(values)), sorted(set(values) - set(wanted))
    if missing or unknown:
        problem = f"give {missing[0]}=…" if missing else f"{unknown[0]} is not asked for"
        raise SystemExit(f"render.py: {problem}; the values are {', '.join(wanted)}")
    for name, value in values.items():
        if re.search(r"[\"'\\\n`$]|: | #", value):
            raise SystemExit(
                f"render.py: {name} has a quote, dollar, colon or comment in it: {value}"
            )
    code = "\n".join(line for line in template.splitlines() if not line.lstrip().startswith("#"))
    return string.Template(code).substitute(values) + "\n"


def check(path: Path) -> None:
    """Raise an error where a manifest, filled in, does not fit the schema of its kind."""
    import kubernetes_validate

    template = path.read_text(encoding="utf-8")
    values = {name: "4" if name in NUMBERS else "sample" for name in names(template)}
    for document in yaml.safe_load_all(render(template, values)):
        for part in standard_parts(document):
            kubernetes_validate.validate(part, KUBERNETES, strict=True)


def standard_parts(document: Mapping[str, Any]) -> list[Any]:
    """The parts of a document that Kubernetes has schemas for: a JobSet is an addition, whose jobs are not."""
    if document["kind"] != "JobSet":
        return [document]
    known = {
        "failurePolicy",
        "successPolicy",
        "replicatedJobs",
        "network",
        "suspend",
        "startupPolicy",
    }
    spec = document["spec"]
    if document["apiVersion"] != "jobset.x-k8s.io/v1alpha2" or set(spec) - known:
        raise ValueError(f"not a JobSet of v1alpha2: {sorted(set(spec) - known)}")
    jobs = []
    for job in spec["replicatedJobs"]:
        if set(job) != {"name", "replicas", "template"}:
            raise ValueError(f"not a replicated job: {sorted(job)}")
        metadata = {"name": job["name"]}
        jobs.append(
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, **job["template"]}
        )
    return jobs


def main(arguments: Sequence[str]) -> None:
    """The command line; see the module."""
    words = [word for word in arguments if not word.startswith("--")]
    if "--check" in arguments:
        for word in words:
            check(Path(word))
            print(f"{word}: fits Kubernetes {KUBERNETES}")
        return
    if not words:
        raise SystemExit(__doc__)
    values = dict(word.split("=", 1) for word in words[1:])
    manifest = render(Path(words[0]).read_text(encoding="utf-8"), values)
    if "--dry-run" in arguments:
        print("\n".join(f"# {name}={value}" for name, value in values.items()))
    print(manifest, end="")


if __name__ == "__main__":
    main(sys.argv[1:])
