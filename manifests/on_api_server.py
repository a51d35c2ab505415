"""The CRDs and the admission policies on a real API server: what each of them accepts, and refuses by its reason.

RDMA_LAB_KUBERNETES is a folder with etcd and kube-apiserver (tests/lab/README.md).
"""

import json
import os
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from render import helm, objects, profile

HOST = "127.0.0.77"
RESOURCES = "/apis/rdma-netdev.io/v1alpha1/addresssubnets"
STATES = "/apis/rdma-netdev.io/v1alpha1/rdmanodes"
NAME = "10.56.3.0-00112233445566aa"
ADMINISTRATORS_NODE = "control-plane-1"
ACCOUNT = "/api/v1/namespaces/kube-system/serviceaccounts/rdma-netdev"
PATHS = {"CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
         "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
         "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
         "ServiceAccount": "/api/v1/namespaces/kube-system/serviceaccounts",
         "ValidatingAdmissionPolicy": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
         "ValidatingAdmissionPolicyBinding": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"}


def request(method, path, body=None, token="admin"):
    """Status and answer. A patch is a merge patch."""
    kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
    asked = urllib.request.Request(f"https://{HOST}:6443{path}", method=method,
                                   data=None if body is None else json.dumps(body).encode(),
                                   headers={"Authorization": f"Bearer {token}", "Content-Type": kind})
    try:
        # The server made its certificate when it started.
        with urllib.request.urlopen(asked, context=ssl._create_unverified_context(), timeout=60) as answer:
            return answer.status, parsed(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, parsed(error.read())


def parsed(text):
    return json.loads(text) if text.startswith(b"{") else {"message": text.decode()}


def made(method, path, body):
    status, answer = request(method, path, body)
    if status not in (200, 201):
        raise ValueError(f"{method} {path}: {answer.get('message')}")
    return answer


def until(seconds, what, true):
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise ValueError(f"waited in vain: {what}")
        time.sleep(0.2)


def is_ready():
    try:
        return request("GET", "/readyz")[0] == 200
    except (urllib.error.URLError, ConnectionError):
        return False


@contextmanager
def api_server():
    programs = Path(os.environ["RDMA_LAB_KUBERNETES"])
    with tempfile.TemporaryDirectory() as scratch:
        key, tokens = f"{scratch}/key", Path(scratch) / "tokens.csv"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        tokens.write_text("admin,admin,1,system:masters\n")
        etcd, peers = f"http://{HOST}:2379", f"http://{HOST}:2380"
        commands = [
            ["etcd", f"--data-dir={scratch}/etcd", "--unsafe-no-fsync", f"--listen-client-urls={etcd}",
             f"--advertise-client-urls={etcd}", f"--listen-peer-urls={peers}",
             f"--initial-advertise-peer-urls={peers}", f"--initial-cluster=default={peers}"],
            ["kube-apiserver", f"--etcd-servers={etcd}", f"--bind-address={HOST}", f"--advertise-address={HOST}",
             f"--cert-dir={scratch}", "--service-cluster-ip-range=10.96.0.0/16", "--authorization-mode=RBAC",
             f"--token-auth-file={tokens}", "--service-account-issuer=https://kubernetes.default.svc",
             f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}"]]
        running = []
        try:
            for name, *arguments in commands:
                with open(f"{scratch}/{name}.log", "w") as log:
                    running.append(subprocess.Popen([programs / name, *arguments], stdout=log, stderr=log))
            try:
                until(120, "kube-apiserver is ready", is_ready)
            except ValueError as error:
                raise ValueError(f"{error}: {Path(scratch, 'kube-apiserver.log').read_text()[-2000:]}") from error
            yield
        finally:
            for process in reversed(running):
                process.kill()
                process.wait()


def part(node, id, **more):
    return {"node": node, "id": id, **more}


def want(node, id, size=4):
    return {"node": node, "id": id, "size": size, "among": ["10.56.3.0", "10.56.3.255"]}


def document(parts, **spec):
    finalizers = ["rdma-netdev.io/parts"] if parts else []
    return {"apiVersion": "rdma-netdev.io/v1alpha1", "kind": "AddressSubnet",
            "metadata": {"name": NAME, "finalizers": finalizers},
            "spec": {"store": "default", "networkName": "", "subnet": "10.56.3.0/24", "parts": parts, **spec}}


def remove():
    request("DELETE", f"{RESOURCES}/{NAME}")
    request("PATCH", f"{RESOURCES}/{NAME}", {"metadata": {"finalizers": None}})


def answered(what, answer, reason):
    """Nothing if the answer is as expected: `reason` is a part of a refusal's message; None: accepted."""
    status, text = answer[0], answer[1].get("message", "")
    if reason is None and status >= 300:
        yield f"{what}: refused: {text}"
    if reason is not None and (status < 400 or reason not in text):
        yield f"{what}: must be refused ({reason}): {status} {text}"


def definition():
    """What the CRD accepts."""
    n1 = part("n1", "11")
    full = {f"10.56.3.{i}/32": part("n" * 250 + str(i), f"{i:064x}", wanted=[want("w" * 253, "f" * 64, 256)] * 4,
                                    over={"since": "2026-01-01T00:00:00Z", "why": "é" * 512}, network={})
            for i in range(256)}
    created = [
        ("256 parts, each as long as it can be", document(full), None),
        ("parts of IPv6", document({"fd00::300/124": n1, "fd00:0:0:0:0:0:0:3ff/128": n1}, subnet="fd00::300/120"), None),
        ("reserved and assigned parts", document({"10.56.3.0/28": {"reserved": "whereabouts: ml/w-0"}, "10.56.3.16/28": {"node": "n1"}}), None),
        ("no parts", document({}), None),
        ("257 parts", document({**full, "10.56.3.0/24": n1}), "must have at most 256 items"),
        ("five wants", document({"10.56.3.0/28": part("n1", "1", wanted=[want("n2", "2")] * 5)}), "must have at most 4 items"),
        ("neither node nor reserved", document({"10.56.3.0/28": {"id": "1"}}), "a part has a node or is reserved"),
        ("node and reserved", document({"10.56.3.0/28": {"node": "n1", "reserved": "x"}}), "a part has a node or is reserved"),
        ("reserved with id", document({"10.56.3.0/28": {"id": "1", "reserved": "x"}}), "a reserved part has no id"),
        ("an id with capitals", document({"10.56.3.0/28": part("n1", "AB")}), "spec.parts.10.56.3.0/28.id"),
        ("a long node", document({"10.56.3.0/28": part("n" * 254, "1")}), "may not be more than 253"),
        ("an address as part", document({"10.56.3.1": n1}), "a part is a CIDR of at most 256 addresses"),
        ("a part larger than a subnet", document({"10.56.0.0/16": n1}), "a part is a CIDR of at most 256 addresses"),
        ("a subnet of another length", document({}, subnet="10.56.0.0/16"), "spec.subnet"),
        ("no store", document({}, store=None), "spec.store"),
        ("no network name", document({}, networkName=None), "spec.networkName"),
        ("another name", {**document({}), "metadata": {"name": "10.56.3.0"}}, "metadata.name"),
    ]
    for what, body, reason in created:
        yield from answered(what, request("POST", RESOURCES, body), reason)
        remove()
    changed = [("another store", {"store": "x"}, "store cannot change"), ("another subnet", {"subnet": "10.56.4.0/24"}, "subnet cannot change"),
               ("another network name", {"networkName": "x"}, "networkName cannot change"),
               ("one of 256 parts", {"parts": {"10.56.3.7/32": {"over": None}}}, None),
               ("all of 256 parts", {"parts": {key: {"over": None} for key in full}}, None),
               ("255 parts removed", {"parts": {key: None for key in list(full)[1:]}}, None)]
    made("POST", RESOURCES, document(full))
    for what, spec, reason in changed:
        yield from answered(what, request("PATCH", f"{RESOURCES}/{NAME}", {"spec": spec}), reason)
    left = request("GET", f"{RESOURCES}/{NAME}")[1]["spec"]["parts"]
    if len(left) != 1:
        yield f"{len(left)} parts are left, not one"
    remove()


def token(node):
    """The token of the agent's pod on a node."""
    pods = "/api/v1/namespaces/kube-system/pods"
    pod = made("POST", pods, {"metadata": {"name": f"agent-{node}"}, "spec": {
        "serviceAccountName": "rdma-netdev", "automountServiceAccountToken": False, "nodeName": node,
        "containers": [{"name": "agent", "image": "agent"}]}})
    bound = {"kind": "Pod", "apiVersion": "v1", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
    return made("POST", f"{ACCOUNT}/token", {"spec": {"boundObjectRef": bound}})["status"]["token"]


def policy():
    """What the agents of nodes may do, under the admission policy."""
    tokens = {}
    for node in ("n1", "n2", ADMINISTRATORS_NODE):
        made("POST", "/api/v1/nodes", {"metadata": {"name": node, "labels": {"site": "x"}}})
        tokens[node] = token(node)
    tokens["no node"] = made("POST", f"{ACCOUNT}/token", {"spec": {}})["status"]["token"]
    tokens["administrator"] = "admin"
    until(60, "the policy is in force", lambda: request("POST", RESOURCES + "?dryRun=All", document({}), tokens["no node"])[0] == 403)

    own, other, over = part("n1", "11"), part("n2", "22"), {"since": "2026-01-01T00:00:00Z", "why": "gone"}
    two = {"10.56.3.0/28": own, "10.56.3.16/28": other}
    asked = {"10.56.3.0/28": part("n1", "11", wanted=[want("n2", "aa")]),
             "10.56.3.32/28": own,
             "10.56.3.16/28": part("n2", "22", wanted=[want("n1", "99")]),
             "10.56.3.64/28": part("n3", "33", wanted=[want("n2", "aa"), want("n1", "98")])}
    is_over = {"10.56.3.16/28": part("n2", "22", over=over, wanted=[want("n1", "44"), want("n3", "45")])}
    network = {"10.56.3.16/28": part("n2", "22", network={})}
    reserved = {"10.56.3.16/28": {"reserved": "x"}}
    taken = {"10.56.3.16/28": {**part("n1", "44"), "over": None, "wanted": None, "network": None}}
    to_n2 = {"10.56.3.0/28": {**part("n2", "aa"), "wanted": None}}
    claim, not_own = {"10.56.3.48/28": part("n1", "12")}, "which is not its own"
    full = {f"10.56.3.{i}/32": part(f"m{i}", "1", wanted=[want(f"w{j}", str(j)) for j in range(4)]) for i in range(255)}
    pieces = {f"10.56.3.{i * 2}/32": own for i in range(128)}
    cases = [
        ("claim", two, "n1", claim, None),
        ("claim in a full document", full, "n1", {"10.56.3.255/32": part("n1", "12")}, None),
        ("claim for another node", two, "n1", {"10.56.3.48/28": part("n2", "12")}, not_own),
        ("claim without a node in the token", two, "no node", claim, "does not name its node"),
        ("claim of a piece of another's part", two, "n1", {"10.56.3.20/30": part("n1", "12")}, "10.56.3.20/30 overlaps another part"),
        ("claim around another's part", two, "n1", {"10.56.3.16/27": part("n1", "12")}, "overlaps another part"),
        ("claim of IPv6", {"fd00::300/124": other}, "n1", {"fd00::310/124": part("n1", "12")}, None),
        ("claim of IPv6 in another's part", {"fd00::300/124": other}, "n1", {"fd00:0:0:0:0:0:0:308/125": part("n1", "12")}, "overlaps another part"),
        ("remove an own part", two, "n1", {"10.56.3.0/28": None}, None),
        ("remove another's part", two, "n1", {"10.56.3.16/28": None}, not_own),
        ("cut an own part", two, "n1", {"10.56.3.0/28": None, "10.56.3.0/30": own, "10.56.3.8/29": own}, None),
        ("cut an own part into 128", {"10.56.3.0/24": own}, "n1", {"10.56.3.0/24": None, **pieces}, None),
        ("not over", {"10.56.3.0/28": part("n1", "11", over=over)}, "n1", {"10.56.3.0/28": {"id": "13", "over": None}}, None),
        ("take up an assigned part", {"10.56.3.0/28": {"node": "n1"}}, "n1", {"10.56.3.0/28": {"id": "13"}}, None),
        ("hand over a piece", asked, "n1", {"10.56.3.0/28": None, "10.56.3.0/29": own, "10.56.3.8/30": part("n2", "aa"),
                                            "10.56.3.64/28": {"wanted": [want("n1", "98")]}}, None),
        ("hand over a piece of another own part", asked, "n1", {"10.56.3.32/28": None, "10.56.3.40/29": own, "10.56.3.32/30": part("n2", "aa"),
                                                                "10.56.3.0/28": {"wanted": None}, "10.56.3.64/28": {"wanted": [want("n1", "98")]}}, None),
        ("hand over a whole part", asked, "n1", to_n2, None),
        ("hand over to a node that did not ask", asked, "n1", {"10.56.3.0/28": {**part("n3", "aa"), "wanted": None}}, not_own),
        ("hand over with another id", asked, "n1", {"10.56.3.0/28": {**part("n2", "ab"), "wanted": None}}, not_own),
        ("hand over what is free", asked, "n1", {"10.56.3.128/28": part("n2", "aa")}, not_own),
        ("take what was asked for", asked, "n2", to_n2, not_own),
        ("ask", two, "n1", {"10.56.3.16/28": {"wanted": [want("n1", "77")]}}, None),
        ("ask for another node", two, "n1", {"10.56.3.16/28": {"wanted": [want("n3", "77")]}}, not_own),
        ("ask no more", asked, "n1", {"10.56.3.16/28": {"wanted": None}}, None),
        ("end another's want, which is too old", asked, "n1", {"10.56.3.64/28": {"wanted": [want("n1", "98")]}}, None),
        ("replace another's want", asked, "n1", {"10.56.3.64/28": {"wanted": [want("n2", "ab"), want("n1", "98")]}}, not_own),
        ("mark over", two, "n1", {"10.56.3.16/28": {"over": over}}, None),
        ("mark a full document over", full, "n1", {key: {"over": over} for key in full}, None),
        ("mark a network over", network, "n1", {"10.56.3.16/28": {"over": over}}, not_own),
        ("change a mark", is_over, "n1", {"10.56.3.16/28": {"over": {"why": "x"}}}, not_own),
        ("remove another's mark", is_over, "n1", {"10.56.3.16/28": {"over": None}}, not_own),
        ("take what is over", is_over, "n1", taken, None),
        ("take what is not over", two, "n1", taken, not_own),
        ("mark and take at once", two, "n1", {"10.56.3.16/28": {**part("n1", "44"), "over": over}}, not_own),
        ("take a network", {"10.56.3.16/28": {**network["10.56.3.16/28"], "over": over}}, "n1", taken, not_own),
        ("change another's id", two, "n1", {"10.56.3.16/28": {"id": "66"}}, not_own),
        ("remove a reserved part", reserved, "n1", {"10.56.3.16/28": None}, not_own),
        ("take a reserved part", reserved, "n1", {"10.56.3.16/28": {**part("n1", "4"), "reserved": None}}, not_own),
        ("reserve what is free", two, "n1", {"10.56.3.48/28": {"reserved": "x"}}, not_own),
        ("reserve on an administrator's node", two, ADMINISTRATORS_NODE, {"10.56.3.48/28": {"reserved": "x"}, "10.56.3.16/28": None}, None),
        ("the administrator", two, "administrator", {"10.56.3.48/28": {"reserved": "x"}, "10.56.3.16/28": None}, None),
    ]
    for what, before, who, parts, reason in cases:
        made("POST", RESOURCES, document(before))
        yield from answered(what, request("PATCH", f"{RESOURCES}/{NAME}", {"spec": {"parts": parts}}, tokens[who]), reason)
        remove()
    unbound = {"metadata": {"finalizers": None}}
    last = {**unbound, "spec": {"parts": {"10.56.3.0/28": None}}}
    objects_of = [("remove the finalizer", two, "PATCH", unbound, "the finalizer rdma-netdev.io/parts must stay"),
                  ("remove the last part", {"10.56.3.0/28": own}, "PATCH", last, None),
                  ("delete an empty document", {}, "DELETE", None, None),
                  ("delete another's part", two, "DELETE", None, not_own)]
    for what, before, method, body, reason in objects_of:
        made("POST", RESOURCES, document(before))
        yield from answered(what, request(method, f"{RESOURCES}/{NAME}", body, tokens["n1"]), reason)
        remove()
    yield from states(tokens)
    yield from marks(tokens)
    for what, parts, reason in [("create with an own part", {"10.56.3.0/28": own}, None), ("create with another's part", two, not_own)]:
        yield from answered(what, request("POST", RESOURCES, document(parts), tokens["n1"]), reason)
        remove()


def states(tokens):
    """What the agents of nodes may do with RdmaNodes."""
    accounts = "/api/v1/namespaces/default/serviceaccounts"
    made("POST", accounts, {"metadata": {"name": "tenant"}})
    tokens["tenant"] = made("POST", f"{accounts}/tenant/token", {"spec": {}})["status"]["token"]
    other, forbidden = "cannot write rdmanodes of node n2", "is forbidden"
    state = {"apiVersion": "rdma-netdev.io/v1alpha1", "kind": "RdmaNode", "status": {"problems": []}}
    changed = {"status": {"problems": ["x"]}}
    cases = [("create the own", "POST", "n1", "n1", None), ("create another's", "POST", "n1", "n2", other),
             ("create without a node in the token", "POST", "no node", "n2", "does not name its node"),
             ("create as an administrator", "POST", "administrator", "n2", None),
             ("change the own", "PATCH", "n1", "n1", None), ("change another's", "PATCH", "n1", "n2", other),
             ("change another's as a node of administrators", "PATCH", ADMINISTRATORS_NODE, "n2", "cannot write"),
             ("read the own", "GET", "n1", "n1", None), ("read as a tenant", "GET", "tenant", "n1", forbidden),
             ("list", "GET", "n1", "", forbidden), ("delete the own", "DELETE", "n1", "n1", forbidden)]
    for what, method, who, node, reason in cases:
        path = STATES if method == "POST" else f"{STATES}/{node}".rstrip("/")
        body = {"POST": {**state, "metadata": {"name": node}}, "PATCH": changed}.get(method)
        yield from answered(f"RdmaNode: {what}", request(method, path, body, tokens[who]), reason)
    # As agent/src/events.rs makes them.
    regards = [("the own Node", {"kind": "Node", "name": "n1", "uid": "n1"}, None),
               ("another's Node", {"kind": "Node", "name": "n2", "uid": "n2"}, "cannot write events of node n2"),
               ("a pod", {"kind": "Pod", "namespace": "default", "name": "p", "uid": "1"}, None)]
    for number, (what, regarding, reason) in enumerate(regards):
        event = {"apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": {"name": f"n1.{number}"},
                 "eventTime": "2026-11-30T09:12:00.000000Z", "type": "Warning", "reason": "HcaUnhealthy", "action": "Watch",
                 "note": "x" * 1000, "regarding": {"apiVersion": "v1", **regarding},
                 "reportingController": "rdma-netdev.io/rdma-agent", "reportingInstance": "n1"}
        path = "/apis/events.k8s.io/v1/namespaces/default/events"
        yield from answered(f"event on {what}", request("POST", path, event, tokens["n1"]), reason)


def marks(tokens):
    """What the agents of nodes may change of Nodes."""
    only = "can change condition RdmaReady, taint rdma-netdev.io/missing and its own labels only"
    at = {"lastTransitionTime": "2026-11-30T09:12:00Z", "lastHeartbeatTime": "2026-11-30T09:12:00Z", "reason": "x", "message": "x"}
    ready, disk = ({"type": kind, "status": "False", **at} for kind in ("RdmaReady", "DiskPressure"))
    missing, other = ({"key": key, "effect": "NoSchedule"} for key in ("rdma-netdev.io/missing", "other"))
    before = request("GET", "/api/v1/nodes/n1")[1]["spec"].get("taints", [])
    cases = [("the own condition", "n1/status", {"status": {"conditions": [ready]}}, None),
             ("another condition", "n1/status", {"status": {"conditions": [ready, disk]}}, only),
             ("the own capacity", "n1/status", {"status": {"capacity": {"rdma/nic": "9"}}}, only),
             ("another Node's condition", "n2/status", {"status": {"conditions": [ready]}}, "node n1 cannot change Node n2"),
             ("the own taint", "n1", {"spec": {"taints": [*before, missing]}}, None),
             ("another taint", "n1", {"spec": {"taints": [*before, missing, other]}}, only),
             ("the own taint away", "n1", {"spec": {"taints": before}}, None),
             ("the own labels", "n1", {"metadata": {"labels": {"rdma-netdev.io/nics": "8", "rdma-netdev.io/rate": "400"}}}, None),
             ("other values of them", "n1", {"metadata": {"labels": {"rdma-netdev.io/nics": "7", "rdma-netdev.io/rate": None}}}, None),
             ("another label", "n1", {"metadata": {"labels": {"rdma-netdev.io/nics": "7", "rdma-netdev.io/x": "y"}}}, only),
             ("another label's value", "n1", {"metadata": {"labels": {"site": "y"}}}, only),
             ("another label away", "n1", {"metadata": {"labels": {"site": None}}}, only),
             ("labels of another Node", "n2", {"metadata": {"labels": {"rdma-netdev.io/nics": "8"}}}, "node n1 cannot change Node n2"),
             ("unschedulable", "n1", {"spec": {"unschedulable": True}}, only),
             ("another Node's taint", "n2", {"spec": {"taints": [missing]}}, "node n1 cannot change Node n2")]
    for what, path, body, reason in cases:
        yield from answered(f"Node: {what}", request("PATCH", f"/api/v1/nodes/{path}", body, tokens["n1"]), reason)


def wrong():
    """What is not as expected."""
    with api_server():
        values = f"admission.administratorNodes={{{ADMINISTRATORS_NODE}}},rdmaNodes.nodeCondition=true,rdmaNodes.taintMissing=true,rdmaNodes.nodeLabels=true"
        chart = objects(helm(profile("admission"), more=["--set", values]))
        for document_ in chart:
            if document_["kind"] in PATHS and document_["kind"] != "ValidatingAdmissionPolicyBinding":
                made("POST", PATHS[document_["kind"]], document_)
        for path in (RESOURCES, STATES):
            until(60, "the CRDs are served", lambda path=path: request("GET", path)[0] == 200)
        yield from (f"CRD: {text}" for text in definition())
        for document_ in chart:
            if document_["kind"] == "ValidatingAdmissionPolicyBinding":
                made("POST", PATHS[document_["kind"]], document_)
        yield from (f"admission policy: {text}" for text in policy())
