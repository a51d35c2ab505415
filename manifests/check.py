"""Checks every kustomization below manifests/; see manifests/check, which starts this.

Four questions, each with its own function: does it render, do the Kubernetes schemas accept it,
do the objects agree among themselves, and do our programs accept the configuration in it. The same
of the Helm chart, which must make what the base makes.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import kubernetes_validate
import yaml

MANIFESTS = Path("manifests")
CHART = MANIFESTS / "helm"
PROGRAMS = Path(os.environ["RDMA_BIN_DIR"])
# The oldest and the newest that the schemas know; what both accept is accepted between.
VERSIONS = [kubernetes_validate.utils.all_versions()[0], kubernetes_validate.latest_version()]
# Kinds of others, which the schemas do not know; checked below by what reads them.
FOREIGN = {
    "NetworkAttachmentDefinition": "k8s.cni.cncf.io/v1",
    "SecurityContextConstraints": "security.openshift.io/v1",
    "MPIJob": "kubeflow.org/v2beta1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
}
NETWORKS = "k8s.v1.cni.cncf.io/networks"
RESOURCE = "k8s.v1.cni.cncf.io/resourceName"


def renderer():
    if shutil.which("kustomize"):
        return ["kustomize", "build"]
    if shutil.which("kubectl"):
        version = subprocess.run(["kubectl", "version", "--client"], capture_output=True, text=True, check=False)
        found = re.search(r"Kustomize Version: v(\d+)", version.stdout)
        if found and int(found[1]) >= 5:
            return ["kubectl", "kustomize"]
    sys.exit("neither kustomize nor kubectl (with kustomize 5 or later inside) is installed: nothing can be "
             "rendered; Debian has it as the package kustomize, from release 13 on")


def render(command, directory):
    done = subprocess.run([*command, str(directory)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return [], [f"does not render: {done.stderr.strip()}"]
    warnings = [f"renders with a warning: {line}" for line in done.stderr.splitlines() if line.strip()]
    return [document for document in yaml.safe_load_all(done.stdout) if document], warnings


def chart(values, namespace):
    """The Helm chart as it would be installed; `values` is a file or None."""
    command = ["helm", "template", "rdma-device-plugin", str(CHART), "--namespace", namespace]
    command += ["--values", str(values)] if values else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return [], [f"does not render: {done.stderr.strip()}"]
    documents = [document for document in yaml.safe_load_all(done.stdout) if document]
    linted = subprocess.run(["helm", "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)
    return documents, [f"helm lint: {linted.stdout.strip()}"] if linted.returncode else []


# What the chart makes with these values is what the kustomization makes: one truth, two ways to install it.
SAME = {MANIFESTS / "base": None, MANIFESTS / "overlays/local-store": CHART / "ci/local-store.yaml"}


def like_the_kustomization(command, directory, values):
    (ours, wrong), (helm, faults) = render(command, directory), chart(values, "kube-system")
    yield from wrong + faults

    def plain(documents):
        found = {}
        for document in documents:
            metadata = document["metadata"]
            metadata["name"] = re.sub(r"-[a-z0-9]{10}$", "", metadata["name"])
            labels = metadata.pop("labels", {})
            found[f"{document['kind']} {metadata['name']}"] = document
            if document["kind"] == "ConfigMap":
                document["data"] = {key: yaml.safe_load(text) for key, text in document["data"].items()}
            elif document["kind"] == "DaemonSet":
                metadata["labels"] = {"app.kubernetes.io/name": labels.get("app.kubernetes.io/name")}
                # In no order that means anything.
                spec = document["spec"]["template"]["spec"]
                for key in ("containers", "volumes"):
                    spec[key] = {each["name"]: each for each in spec[key]}
                for volume in spec["volumes"].values():
                    if "configMap" in volume:
                        volume["configMap"]["name"] = "rdma-device-plugin"
        return found

    ours, helm = plain(ours), plain(helm)
    for name in sorted(ours.keys() | helm.keys()):
        yield from differences(name, ours.get(name), helm.get(name), directory)


def differences(where, one, other, ours):
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            yield from differences(f"{where}.{key}", one.get(key), other.get(key), ours)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from differences(f"{where}[{index}]", left, right, ours)
    elif one != other:
        yield f"{where} is {one!r} in {ours}, and {other!r} in the chart"


def name_of(document):
    return f"{document['kind']} {document['metadata']['name']}"


def against_schemas(documents):
    for document in documents:
        if FOREIGN.get(document["kind"]) == document["apiVersion"]:
            continue
        for version in VERSIONS:
            try:
                kubernetes_validate.validate(document, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                where = ".".join(str(step) for step in error.path)
                yield f"{name_of(document)}: Kubernetes {version} refuses {where}: {error.message}"
            except kubernetes_validate.SchemaNotFoundError as error:
                yield f"{name_of(document)}: {error.message}"


def pod_specs(value):
    """Each pod, or pod template, in a document of any kind: (metadata, spec)."""
    if isinstance(value, list):
        for item in value:
            yield from pod_specs(item)
    elif isinstance(value, dict):
        spec = value.get("spec")
        if isinstance(spec, dict) and "containers" in spec:
            yield value.get("metadata", {}), spec
        for item in value.values():
            yield from pod_specs(item)


def agreement(documents):
    networks = {d["metadata"]["name"]: d["metadata"].get("annotations", {}).get(RESOURCE)
                for d in documents if d["kind"] == "NetworkAttachmentDefinition"}
    config_maps = {d["metadata"]["name"] for d in documents if d["kind"] == "ConfigMap"}
    with open("Cargo.toml", "rb") as file:
        version = tomllib.load(file)["workspace"]["package"]["version"]
    for document in documents:
        for metadata, spec in pod_specs(document):
            containers = spec["containers"] + spec.get("initContainers", [])
            volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
            mounted = {mount["name"] for c in containers for mount in c.get("volumeMounts", [])}
            for name in mounted ^ set(volumes):
                what = "is not mounted" if name in volumes else "is mounted and is no volume"
                yield f"{name_of(document)}: {name} {what}"
            for volume in volumes.values():
                config_map = volume.get("configMap", {}).get("name")
                if config_map and config_map not in config_maps:
                    yield f"{name_of(document)}: ConfigMap {config_map} is not among the objects"
            for container in containers:
                if "/rdma-device-plugin:" in container["image"]:
                    if not container["image"].endswith(f":{version}"):
                        yield f"{name_of(document)}: image {container['image']}, but this is version {version}"
                    if container.get("args", [""])[0] == "run" and not spec.get("hostNetwork"):
                        yield f"{name_of(document)}: the daemon outside the node's network sees no netdev"
            yield from (f"{name_of(document)}: {text}" for text in asks(metadata, containers, networks))


def asks(metadata, containers, networks):
    """A network that comes with a device is only attached where a device was asked for."""
    wanted = metadata.get("annotations", {}).get(NETWORKS, "")
    wanted = [entry["name"] for entry in json.loads(wanted)] if wanted.startswith("[") else \
        [re.sub(r"^.*/|@.*$", "", entry.strip()) for entry in wanted.split(",") if entry.strip()]
    for network in wanted:
        if network not in networks:
            yield f"network {network} is not among the objects"
            continue
        resource = networks[network]
        units = sum(int(c.get("resources", {}).get("limits", {}).get(resource, 0)) for c in containers)
        sharing = sum(networks[other] == resource for other in wanted if other in networks)
        if resource and units < sharing:
            yield f"{sharing} networks with a device of {resource}, but {units} asked for"


def refused(what, program, *arguments, env=None, stdin=""):
    done = subprocess.run([PROGRAMS / program, *arguments], input=stdin, env=env, timeout=60,
                          capture_output=True, text=True, check=False)
    if done.returncode != 0:
        yield f"{what}: {program} refuses it: {(done.stderr or done.stdout).strip()}"


def accepted(documents, scratch):
    """Each configuration by the program that will read it."""
    for document in documents:
        data = document.get("data", {}) if document["kind"] == "ConfigMap" else {}
        what = name_of(document)
        if "config.yaml" in data:
            file = scratch / "config.yaml"
            file.write_text(data["config.yaml"])
            yield from refused(f"{what}, config.yaml", "rdmactl", "validate", file)
        if "policy.json" in data:
            given = scratch / "policy.json"
            given.write_text(data["policy.json"])
            for directory in ["etc", "bin"]:
                (scratch / directory).mkdir(exist_ok=True)
            yield from refused(f"{what}, policy.json", "rdma-device-plugin", "install", f"--policy={given}",
                               f"--policy-to={scratch}/etc/policy.json", f"--to={scratch}/bin")
        if document["kind"] == "NetworkAttachmentDefinition":
            yield from accepted_network(document, scratch)


def accepted_network(document, scratch):
    """STATUS is the command that reads a configuration and touches nothing; it exists since CNI 1.1.0."""
    what = name_of(document)
    try:
        config = json.loads(document["spec"]["config"])
    except ValueError as error:
        yield f"{what}: spec.config is not JSON: {error}"
        return
    if config.get("name") != document["metadata"]["name"]:
        yield f"{what}: the network in it is called {config.get('name')}"
    policy = scratch / "node" / "policy.json"
    policy.parent.mkdir(exist_ok=True)
    # A store that a policy names has to be there.
    (scratch / "leases").mkdir(exist_ok=True)
    policy.write_text(json.dumps({
        "stateDir": f"{scratch}/state", "node": "node-1",
        "stores": {"default": {"type": "file", "directory": f"{scratch}/leases"}}}))
    given = RESOURCE in document["metadata"].get("annotations", {})
    for plugin in config.get("plugins", [config]):
        if plugin.get("type") not in ("rdma-netdev", "rdma-ipam"):
            continue
        # As Multus hands it over.
        plugin = {**plugin, "name": config.get("name"), "cniVersion": "1.1.0"}
        if given:
            plugin |= {"deviceID": "0000:3b:00.0", "pciBusID": "0000:3b:00.0"}
        # A netdev of the cluster's nodes: STATUS would search for it here.
        plugin.pop("master", None)
        env = {"CNI_COMMAND": "STATUS", "CNI_PATH": str(PROGRAMS), "RDMA_NETDEV_POLICY": str(policy)}
        yield from refused(what, plugin["type"], env=env, stdin=json.dumps(plugin))


def wrong_in(what, documents, problems):
    """Asks the three questions of rendered objects, and prints; true if something is wrong."""
    with tempfile.TemporaryDirectory() as scratch:
        for question in (against_schemas, agreement, lambda d, s=Path(scratch): accepted(d, s)):
            problems.extend(question(documents))
    names = "; ".join(name_of(document) for document in documents)
    print(f"{'ok' if not problems else 'WRONG'}  {what}: {names}")
    for problem in problems:
        print(f"    {problem}")
    return bool(problems)


def main():
    command = renderer()
    missing = [p for p in ("rdma-device-plugin", "rdmactl", "rdma-netdev", "rdma-ipam", "rdma-ipam-broker") if not (PROGRAMS / p).exists()]
    if missing:
        sys.exit(f"{', '.join(missing)} not in {PROGRAMS}: run `make build` first")
    wrong = 0
    for kustomization in sorted(MANIFESTS.rglob("kustomization.yaml")):
        wrong += wrong_in(kustomization.parent, *render(command, kustomization.parent))
    wrong += wrong_in(CHART, *chart(None, "kube-system"))
    for values in sorted((CHART / "ci").glob("*.yaml")):
        wrong += wrong_in(f"{CHART} with {values.name}", *chart(values, "rdma-netdev"))
    problems = [p for directory, values in SAME.items() for p in like_the_kustomization(command, directory, values)]
    for problem in problems:
        print(f"WRONG  {problem}")
    print(f"Kubernetes {' and '.join(VERSIONS)}; rendered by {' '.join(command)} and helm")
    sys.exit(1 if wrong or problems else 0)


main()
