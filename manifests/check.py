"""Checks the chart, what is rendered from it, and the examples; see manifests/check, which starts this.

For each set of objects: does it render, do the Kubernetes schemas accept it, do the objects agree
among themselves, and do our programs accept the configuration in it.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import kubernetes_validate
import yaml

sys.dont_write_bytecode = True
import on_api_server  # noqa: E402
from render import CHART, MANIFESTS, NAMESPACE, PROFILES, differing, helm, identity, objects, profile  # noqa: E402

PROGRAMS = Path(os.environ["RDMA_BIN_DIR"])
# The oldest that the chart admits, and the newest that the schemas know.
OLDEST = re.search(r'kubeVersion: ">=1\.(\d+)', (CHART / "Chart.yaml").read_text())[1]
VERSIONS = [f"1.{OLDEST}", kubernetes_validate.latest_version()]
# Since which minor version a pod can refer to these fields of itself; the schemas do not say it.
FIELD_PATHS = {"metadata.name": 0, "metadata.namespace": 0, "metadata.uid": 0, "spec.nodeName": 0,
               "spec.serviceAccountName": 0, "status.hostIP": 0, "status.podIP": 0, "status.podIPs": 20,
               "status.hostIPs": 29}
# Since which minor version the API serves these kinds; a profile with them says so.
SINCE = {"ValidatingAdmissionPolicy": 30, "ValidatingAdmissionPolicyBinding": 30}
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
# Profiles that a site combines: late binding on OpenShift with a driver container, for example.
COMBINED = [["late", "openshift"], ["late", "driver-container"], ["late", "openshift", "driver-container"],
            ["infiniband", "nfs-store", "monitoring"], ["admission", "openshift"], ["exclusive", "local-store", "openshift"],
            ["gke", "driver-container", "uninstall"], ["late", "openshift", "driver-container", "uninstall"]]
# Values that the chart must refuse, and the word by which it names what is wrong.
REFUSED = {"cniplugins.install=false": "cniplugins", "updateStrategy.rollingUpdate.maxSurge=1": "maxSurge",
           "pools.configlist=x": "pools must have one of the keys", "image.digest=latest": "digest",
           "policy.stores.default.directory=/mnt": "cannot have the key directory",
           "policy.stores.default.blocks.ipv4=32": "blocks",
           "admission.enabled=true,whereabouts.enabled=true,whereabouts.ranges={10.0.0.0/24}": "administratorNodes",
           "rdmaNodes.nodeCondition=true": "need admission.enabled", "rdmaNodes.taintMissing=true": "need admission.enabled",
           "rdmaNodes.nodeLabels=true": "need admission.enabled",
           "policy.stores.shared.type=file,policy.stores.shared.directory=/mnt": "set sharedStore", "image=null": "image", "policy=null": "policy"}
# Each value that no profile sets.
EVERYTHING = """
image: {repository: registry.example/rdma-netdev, digest: "sha256:%s", pullPolicy: Always}
imagePullSecrets: [{name: registry}]
pools: {configList: [{resourceName: hca, rdmaHcaMax: 10, devices: [ens2f0]}]}
policy: {stateDir: /data/rdma, cdiDir: /etc/cdi, stores: {default: {type: file, directory: /mnt/rdma/addresses}, cluster: {type: kubernetes}}}
networks: {nic: {namespace: default, resourceName: rdma/nic, plugins: [{type: rdma-netdev, attach: move}]}}
cni: {binDir: /opt/bin, rdmactl: true}
kubeletRootDir: /data/kubelet
sharedStore: /mnt/rdma
seLinuxType: container_runtime_t
metricsPort: 9999
agent: {metricsPort: 9997}
admission: {enabled: true, administratorNodes: [control-plane-1, control-plane-2]}
rdmaNodes: {nodeCondition: true, taintMissing: true, nodeLabels: true, nodeFeatures: false}
whereabouts: {enabled: true, namespace: openshift-multus, ranges: [10.56.0.0/24, "fd00::/120"], schedule: "0 * * * *"}
monitoring: {enabled: true, labels: {release: prometheus}, docsUrl: "https://docs.example/", dashboard: true}
extraArgs: [--log-level=debug]
extraEnv: [{name: RDMA_EXAMPLE, value: "1"}]
extraVolumes: [{name: topology, hostPath: {path: /opt/topology}}]
extraVolumeMounts: [{name: topology, mountPath: /opt/topology, readOnly: true}]
podAnnotations: {example: "1"}
podLabels: {team: hpc}
affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: feature.node.kubernetes.io/pci-15b3.present, operator: In, values: ["true"]}]}]}}}
updateStrategy: {type: OnDelete}
minReadySeconds: 0
""" % ("0" * 64)


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


def kustomize(command, directory):
    done = subprocess.run([*command, str(directory)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return [], [f"does not render: {done.stderr.strip()}"]
    warnings = [f"renders with a warning: {line}" for line in done.stderr.splitlines() if line.strip()]
    documents = objects(done.stdout)
    for document in documents:
        # kustomize takes kinds that it does not know for namespaced ones; kubectl and the API server do not.
        if document["kind"] in ("SecurityContextConstraints", *SINCE):
            document["metadata"].pop("namespace", None)
    return documents, warnings


def combined(command, names, namespace, scratch):
    """The base with components, in a namespace, as a kustomization of a user."""
    directory = scratch / "kustomization"
    directory.mkdir(exist_ok=True)
    here = os.path.relpath(MANIFESTS, directory)
    (directory / "kustomization.yaml").write_text(json.dumps({
        "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "namespace": namespace,
        "resources": [f"{here}/base"], "components": [f"{here}/components/{name}" for name in names]}))
    return kustomize(command, directory)


def chart(*values, **how):
    try:
        return objects(helm(*values, **how)), []
    except ValueError as error:
        return [], [f"does not render: {error}"]


def alike(one, other):
    """Where two sets of objects differ; the order of a list by name means nothing."""
    def plain(value):
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return sorted((plain(inner) for inner in value), key=lambda v: json.dumps(v, sort_keys=True)) \
                if all(isinstance(inner, dict) for inner in value) else value
        # kustomize takes the last line's end from a patch.
        return value.rstrip("\n") if isinstance(value, str) else value

    one, other = ({identity(d): plain(d) for d in documents} for documents in (one, other))
    for key in sorted(one.keys() | other.keys(), key=str):
        yield from differences(" ".join(str(part) for part in key[1::2]), one.get(key), other.get(key))


def differences(where, one, other):
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            yield from differences(f"{where}.{key}", one.get(key), other.get(key))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from differences(f"{where}[{index}]", left, right)
    elif one != other:
        yield f"{where} is {one!r} with kustomize, {other!r} with helm"


def name_of(document):
    return f"{document['kind']} {document['metadata']['name']}"


def against_schemas(documents):
    for document in documents:
        if FOREIGN.get(document["kind"]) == document["apiVersion"]:
            continue
        for version in VERSIONS:
            if int(version.split(".")[1]) < SINCE.get(document["kind"], 0):
                continue
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


def field_paths(value):
    if isinstance(value, list):
        for item in value:
            yield from field_paths(item)
    elif isinstance(value, dict):
        if isinstance(value.get("fieldRef"), dict):
            yield value["fieldRef"]["fieldPath"]
        for item in value.values():
            yield from field_paths(item)


def referred(document):
    """What an object names: (kind, namespace, name)."""
    namespace = document["metadata"].get("namespace")
    for subject in document.get("subjects", []):
        yield subject["kind"], subject.get("namespace"), subject["name"]
    if "roleRef" in document:
        role = document["roleRef"]
        yield role["kind"], namespace if role["kind"] == "Role" else None, role["name"]
    for rule in document.get("rules", []) or []:
        for resource in rule.get("resources", []):
            if resource == "securitycontextconstraints":
                yield from (("SecurityContextConstraints", None, name) for name in rule["resourceNames"])
    for _, spec in pod_specs(document):
        if "serviceAccountName" in spec:
            yield "ServiceAccount", namespace, spec["serviceAccountName"]
        for volume in spec.get("volumes", []):
            for source in [volume, *volume.get("projected", {}).get("sources", [])]:
                named = [("ConfigMap", source.get("configMap"), "name"), ("Secret", source.get("secret"), "secretName")]
                for kind, found, key in named:
                    if found and not found.get("optional") and found[key] != "kube-root-ca.crt":
                        yield kind, namespace, found[key]


def agreement(documents):
    networks = {d["metadata"]["name"]: d["metadata"].get("annotations", {}).get(RESOURCE)
                for d in documents if d["kind"] == "NetworkAttachmentDefinition"}
    there = {(d["kind"], d["metadata"].get("namespace"), d["metadata"]["name"]) for d in documents}
    with open("Cargo.toml", "rb") as file:
        version = tomllib.load(file)["workspace"]["package"]["version"]
    for document in documents:
        for kind, namespace, name in referred(document):
            if (kind, namespace, name) not in there:
                yield f"{name_of(document)}: {kind} {namespace}/{name} is not among the objects"
        for path in field_paths(document):
            if FIELD_PATHS.get(re.sub(r"\[.*", "", path), 99) > int(OLDEST):
                yield f"{name_of(document)}: fieldPath {path} is not known to Kubernetes 1.{OLDEST}"
        for metadata, spec in pod_specs(document):
            containers = spec["containers"] + spec.get("initContainers", [])
            volumes = {volume["name"] for volume in spec.get("volumes", [])}
            # A container that the next one asks.
            names = [c["name"] for c in spec.get("initContainers", [])]
            if "rdma-agent" in names and names[-1:] != ["uninstall"]:
                yield f"{name_of(document)}: init containers run in this order: {', '.join(names)}"
            mounted = {mount["name"] for c in containers for mount in c.get("volumeMounts", [])}
            # The volumes of the cleaning pods are the daemon's.
            unused = set() if containers[0]["name"] == "clean" else volumes - mounted
            yield from (f"{name_of(document)}: {name} is not mounted" for name in unused)
            yield from (f"{name_of(document)}: {name} is mounted and is not a volume" for name in mounted - volumes)
            for container in containers:
                image = container.get("image", "")
                if "/rdma-netdev:" in image and not image.endswith(f":{version}"):
                    yield f"{name_of(document)}: image {image}, but this is version {version}"
                if container.get("args", [])[:1] == ["run"] and not spec.get("hostNetwork"):
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
        if "pools.json" in data:
            file = scratch / "pools.json"
            file.write_text(data["pools.json"])
            yield from refused(f"{what}, pools.json", "rdmactl", "validate", file)
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
    policy.write_text(json.dumps({
        "stateDir": f"{scratch}/state", "node": "node-1",
        "stores": {"default": {"type": "file"}}}))
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
    """Asks the questions of a set of objects, and prints; true if something is wrong."""
    with tempfile.TemporaryDirectory() as scratch:
        for question in (against_schemas, agreement, lambda d, s=Path(scratch): accepted(d, s)):
            problems.extend(question(documents))
    names = "; ".join(name_of(document) for document in documents)
    return said(what, problems, names)


def said(what, problems, names=""):
    print(f"{'ok' if not problems else 'WRONG'}  {what}{names and ': '}{names}")
    for problem in problems:
        print(f"    {problem}")
    return bool(problems)


def same_by_both(command, names, scratch):
    """The chart with values, and the base with components, in two namespaces."""
    for namespace in (NAMESPACE, "my-rdma"):
        what = f"{' + '.join(names) or 'base'} in {namespace}"
        helms, wrong = chart(*map(profile, names), namespace=namespace)
        components, faults = combined(command, names, namespace, scratch)
        yield wrong_in(f"chart, {what}", helms, wrong)
        yield wrong_in(f"kustomize, {what}", components, faults + list(alike(components, helms)))


def example_of_the_base(command, scratch):
    """The kustomization that manifests/base shows: its own pools replace those of its component."""
    lines = (MANIFESTS / "base/kustomization.yaml").read_text().splitlines()
    text = "\n".join(line[4:] for line in lines if line.startswith("#   "))
    directory = scratch / "example"
    directory.mkdir()
    (directory / "kustomization.yaml").write_text(text.replace("PATH", os.path.relpath(".", directory)))
    documents, wrong = kustomize(command, directory)
    yield from wrong
    data = {d["kind"]: d for d in documents}.get("ConfigMap", {}).get("data", {})
    if '"mode": "exclusive"' not in data.get("pools.json", ""):
        yield f"its pools are {data.get('pools.json')}"


def refuses():
    for value, word in REFUSED.items():
        _, problems = chart(more=["--set", value])
        if not problems or word not in problems[0]:
            yield f"--set {value}: {problems[0] if problems else 'is accepted'}"


def two_releases():
    """Two releases for two kinds of nodes have no object in common."""
    first, wrong = chart(release="rdma-compute")
    second, faults = chart(release="rdma-storage", more=["--set", "crds.install=false"])
    yield from wrong + faults
    yield from (f"{key} is in both" for key in {*map(identity, first)} & {*map(identity, second)})
    selectors = [d["spec"]["selector"] for d in first + second if d["kind"] == "DaemonSet"]
    if len(selectors) != 2 or selectors[0] == selectors[1]:
        yield f"the selectors are {selectors}"


def alerts(scratch):
    """Each alert fires and stays silent as manifests/alerts.yaml says, by promtool."""
    rules = next(d for d in chart(profile("monitoring"))[0] if d["kind"] == "PrometheusRule")["spec"]
    rules_by_name = {rule["alert"]: rule for group in rules["groups"] for rule in group["rules"]}
    cases = yaml.safe_load((MANIFESTS / "alerts.yaml").read_text())
    yield from (f"manifests/alerts.yaml and the chart differ in {name}" for name in cases.keys() ^ rules_by_name.keys())

    def test(name, series, fired):
        values = [{"series": key, "values": value if isinstance(value, str) else f"{value}x120"} for key, value in series.items()]
        expected = [{"alertname": name, "eval_time": "2h", "exp_alerts": fired}]
        return {"name": name, "interval": "1m", "input_series": values, "alert_rule_test": expected}

    tests = []
    for name in cases.keys() & rules_by_name.keys():
        case, rule = cases[name], rules_by_name[name]
        annotations = {**rule["annotations"], "summary": case["summary"]}
        fired = {"exp_labels": {**case["labels"], **rule["labels"]}, "exp_annotations": annotations}
        tests += [test(name, case["fires"], [fired]), *(test(name, series, []) for series in case["silent"])]
    (scratch / "rules.json").write_text(json.dumps(rules))
    (scratch / "tests.json").write_text(json.dumps({"rule_files": ["rules.json"], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", scratch / "tests.json"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        yield from filter(str.strip, (done.stdout + done.stderr).splitlines())


def documented(scratch):
    """Each helm command of README and docs renders, and each path that kubectl applies is there."""
    files = {"site.yaml": "image: {repository: registry.example/rdma-netdev}", "config.json": '{"configList": []}',
             "pools.json": '{"configList": []}'}
    commands = 0
    for page in [Path("README.md"), *sorted(Path("docs").glob("*.md"))]:
        for line in map(str.strip, page.read_text().splitlines()):
            words = shlex.split(line, comments=True) if re.match(r"(helm (install|upgrade)|(kubectl|oc) apply) ", line) else []
            if words[:1] == ["helm"]:
                commands += 1
                words = [word for word in words[2:] if word not in ("--install", "--reuse-values")]
                for index, word in enumerate(words):
                    if words[index - 1] == "-f" and not Path(word).exists():
                        (scratch / word).write_text(files.get(word, ""))
                        words[index] = str(scratch / word)
                    words[index] = re.sub(r"\$\(cat (\S+)\)", lambda found: files[found[1]], words[index])
                done = subprocess.run(["helm", "template", *words], capture_output=True, text=True, check=False)
                if done.returncode != 0:
                    yield f"{page}: {line}: {done.stderr.strip()}"
            elif words and words[3].startswith("manifests") and not Path(words[3]).exists():
                yield f"{page}: {line}: {words[3]} does not exist"
    if commands < 10:
        yield f"only {commands} helm commands were found"


def main():
    if "--write" in sys.argv[1:]:
        differing(True)
        return
    command = renderer()
    programs = ("rdma-device-plugin", "rdmactl", "rdma-netdev", "rdma-ipam", "rdma-agent")
    missing = [p for p in programs if not (PROGRAMS / p).exists()]
    if missing:
        sys.exit(f"{', '.join(missing)} not in {PROGRAMS}: run `make build` first")
    wrong = said("rendered from the chart", [f"{path} differs: manifests/check --write" for path in differing(False)])
    linted = subprocess.run(["helm", "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)
    wrong += said("helm lint", [linted.stdout.strip()] if linted.returncode else [])
    wrong += said("wrong values are refused by name", list(refuses()))
    wrong += said("two releases", list(two_releases()))
    for text in ("README.md", "docs/install.md"):
        stated = set(re.findall(r"Kubernetes \|? ?1\.(\d+)", Path(text).read_text()))
        wrong += said(f"{text} and the chart name one oldest version",
                      [] if stated == {OLDEST} else [f"{text} names {stated}, the chart {OLDEST}"])
    for kustomization in sorted((MANIFESTS / "examples").rglob("kustomization.yaml")):
        wrong += wrong_in(kustomization.parent, *kustomize(command, kustomization.parent))
    with tempfile.TemporaryDirectory() as scratch:
        wrong += said("commands of README and docs", list(documented(Path(scratch))))
        if shutil.which("promtool"):
            wrong += said("alerts, by promtool", list(alerts(Path(scratch))))
        else:
            print("skipped  alerts, by promtool: it is not installed; Debian has it in the package prometheus")
        wrong += said("the kustomization that base shows", list(example_of_the_base(command, Path(scratch))))
        everything = Path(scratch) / "everything.yaml"
        everything.write_text(EVERYTHING)
        wrong += wrong_in("chart with every value", *chart(everything))
        wrong += wrong_in("chart without CNI programs", *chart(more=["--set", "cni.install=false"]))
        without = ["--set", "cni.install=false,rdmaNodes.enabled=false,admission.enabled=true"]
        wrong += wrong_in("chart without CNI programs and agent", *chart(more=without))
        # As components these do not combine: both change the agent's container, or the CronJob.
        for names in (["nfs-store", "uninstall"], ["after-whereabouts", "openshift"]):
            wrong += wrong_in(f"chart, {' + '.join(names)}", *chart(*map(profile, names)))
        for names in [[], *([name] for name in PROFILES), *COMBINED]:
            wrong += sum(same_by_both(command, names, Path(scratch)))
    if "RDMA_LAB_KUBERNETES" in os.environ:
        wrong += said("CRDs and admission policies on an API server", list(on_api_server.wrong()))
    else:
        print("skipped  CRDs and admission policies on an API server: RDMA_LAB_KUBERNETES is not set")
    print(f"Kubernetes {' and '.join(VERSIONS)}; rendered by {' '.join(command)} and helm")
    sys.exit(1 if wrong else 0)


main()
