"""Renders manifests/base and manifests/components from the Helm chart.

base is the chart with its default values and planConfigMap. A component is what one file of
manifests/chart/values changes in it, as strategic merge patches. Components combine as these files do,
unless two of them replace the same file of the ConfigMap.
"""

import subprocess
import sys
from pathlib import Path

import yaml

MANIFESTS = Path("manifests")
CHART = MANIFESTS / "chart"
PROFILES = sorted(file.stem for file in (CHART / "values").glob("*.yaml"))
RELEASE = "rdma-netdev"
NAMESPACE = "kube-system"
# By which key the API server merges a list (patchMergeKey of the API's types).
MERGE_KEYS = {"containers": "name", "initContainers": "name", "volumes": "name", "env": "name",
              "volumeMounts": "mountPath", "ports": "containerPort"}


class Text(str):
    """A string of several lines, which YAML shows as such."""


yaml.SafeDumper.add_representer(
    Text, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|"))


def profile(name):
    return CHART / "values" / f"{name}.yaml"


def helm(*values, namespace=NAMESPACE, release=RELEASE, more=("--set", "planConfigMap=true")):
    """The chart's objects as text; each of `values` is a file."""
    command = ["helm", "template", release, str(CHART), "--namespace", namespace]
    for file in values:
        command += ["--values", str(file)]
    done = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(done.stderr.strip())
    # Nothing here is managed by Helm.
    lines = (line for line in done.stdout.splitlines(keepends=True)
             if not line.startswith("# Source: ") and "app.kubernetes.io/managed-by" not in line)
    return "".join(lines)


def objects(text):
    return [document for document in yaml.safe_load_all(text) if document]


def identity(document):
    metadata = document["metadata"]
    return document["apiVersion"], document["kind"], metadata.get("namespace"), metadata["name"]


def reference(document):
    """A patch that changes nothing of an object."""
    keys = ("name", "namespace")
    metadata = {key: document["metadata"][key] for key in keys if key in document["metadata"]}
    return {"apiVersion": document["apiVersion"], "kind": document["kind"], "metadata": metadata}


def shown(value):
    """With strings of several lines as such."""
    if isinstance(value, dict):
        return {key: shown(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shown(inner) for inner in value]
    return Text(value) if isinstance(value, str) and "\n" in value else value


def changed(old, new):
    """The strategic merge patch of a map."""
    patch = {}
    for key in [*old, *(key for key in new if key not in old)]:
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if key not in new:
            patch[key] = None
        elif isinstance(before, dict) and isinstance(after, dict):
            # hostPath and emptyDir, for example, exclude each other, but not by a rule for patches.
            patch[key] = changed(before, after)
        elif isinstance(before, list) and isinstance(after, list) and key in MERGE_KEYS:
            patch[key] = changed_list(before, after, MERGE_KEYS[key])
        else:
            patch[key] = after
    return patch


def changed_list(old, new, key):
    before, after = ({item[key]: item for item in items} for items in (old, new))
    gone = [{key: name, "$patch": "delete"} for name in before if name not in after]
    new = [{key: name, **changed(before.get(name, {}), item)} for name, item in after.items()
           if before.get(name) != item]
    return new + gone


def component(name):
    """The files of a component, by name."""
    base, with_profile = ({identity(d): d for d in objects(helm(*values))}
                          for values in ([], [profile(name)]))
    comments = [line for line in profile(name).read_text().splitlines()]
    header = "\n".join(comments[:next(i for i, line in enumerate(comments) if not line.startswith("#"))])
    added = [document for key, document in with_profile.items() if key not in base]
    patches = [{**reference(document), "$patch": "delete"}
               for key, document in base.items() if key not in with_profile]
    patches += [{**reference(document), **changed(base[key], document), **reference(document)}
                for key, document in with_profile.items() if key in base and base[key] != document]

    def dumped(documents):
        return yaml.safe_dump_all([shown(d) for d in documents], sort_keys=False, width=100)

    kustomization = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component"}
    files = {}
    if added:
        kustomization["resources"] = ["objects.yaml"]
        files["objects.yaml"] = dumped(added)
    files_set = sorted(key for patch in patches for key in patch.get("data", {}))
    notes = [f"# It replaces {' and '.join(files_set)}: do not combine it with another that does."] if files_set else []
    notes += [f"# Rendered from manifests/chart/values/{name}.yaml. Use: components: [PATH/{name}]"]
    # One patch each: kustomize 5 fails on a file that deletes two objects.
    kustomization["patches"] = [{"patch": Text(dumped([patch]))} for patch in patches]
    text = "\n".join([header, "#", *notes, yaml.safe_dump(kustomization, sort_keys=False)])
    return {"kustomization.yaml": text, **files}


def rendered():
    """Every file, by path."""
    files = {MANIFESTS / "base/rdma-netdev.yaml":
             "# Rendered from manifests/chart with its default values.\n" + helm()}
    for name in PROFILES:
        for file, text in component(name).items():
            files[MANIFESTS / "components" / name / file] = text
    return files


def differing(write):
    """Which files are not as the chart has them; with `write` they are written."""
    files = rendered()
    there = {path for path in (MANIFESTS / "components").rglob("*.yaml")}
    wrong = [path for path in sorted(there | files.keys())
             if path not in files or not path.exists() or path.read_text() != files[path]]
    if write:
        for path in wrong:
            if path in files:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(files[path])
            else:
                path.unlink()
            print(f"written: {path}", file=sys.stderr)
        return []
    return wrong
