# A whole real cluster of two nodes, from nothing to checked RDMA: helm install, plan, helm upgrade, verify --all; then report
# lab: guests=2 nics=3 memory=3072 cpus=2 timeout=5400 images=pods,node kubernetes=yes
# lab: cdi-containerd=yes
# lab: binaries=rdma-device-plugin,rdma-netdev,rdma-ipam,rdma-agent,rdmactl
# shellcheck shell=bash disable=SC2016,SC2154

# shellcheck source=tests/lab/guest/cluster.sh
. /lab/guest/cluster.sh
manifests=/lab/manifests

# eth0 is the node's own, eth1 and eth2 are HCAs for pods.
node_address "172.20.0.$LAB_GUEST"
for nic in 1 2; do
	make_hca eth$nic mlx5_$nic
	ip link set eth$nic mtu 9000
	wait_for 20 settled eth$nic
done
mount --make-rshared /
start_containerd /lab/containerd
ctr --namespace k8s.io image import /lab/node.tar
meet booted
join_cluster "172.20.0.$LAB_GUEST"
meet_late joined
# A NIC that comes back from a pod has another index.
state_without_indexes() { host_state | sed -E 's/^[0-9]+: //; s/ netdev_index [0-9]+//' | sort; }
before=$(state_without_indexes)

# ends STATUS DESCRIPTION COMMAND…: passes if the command ends so. $checked has what it printed, $complained
# its other output, $seconds how long it took.
ends() {
	local wanted=$1 what=$2 rc=0 begun=$SECONDS
	shift 2
	checked=$("$@" 2>/tmp/complained) || rc=$?
	complained=$(</tmp/complained)
	seconds=$((SECONDS - begun))
	printf '$ %s\n%s\n%s\n' "$*" "$complained" "$checked"
	tell "[$seconds s] \$ $*"
	if [ "$rc" = "$wanted" ]; then pass "$what"; else
		fail "$what" "exit status $rc, not $wanted, of: $*" "$complained" "$checked"
	fi
}
# offered RESOURCE: how many of it each node offers.
offered() { kubectl get nodes -o json | jq -r --arg resource "$1" '[.items[].status.allocatable[$resource] // "0"] | join(" ")'; }
both_offer() { [ "$(offered "$1")" = "$2" ]; }
# of_verify: names of the pods of verify --all.
of_verify() { kubectl get pods -l app.kubernetes.io/name=rdma-verify -o name; }
none_of_verify() { [ -z "$(of_verify)" ]; }
some_of_verify() { ! none_of_verify; }
# cells: each cell of a JSON result, its verdict and rate.
cells() { jq -r '.cells[] | "\(.node) \(.rail) \(.verdict) \(.gbps)"' <<<"$checked"; }

if [ "$LAB_GUEST" = 1 ]; then
	ln -s /lab/bin/rdmactl /usr/local/bin/kubectl-rdma
	begun=$SECONDS
	step "helm install"
	check "the API server takes the chart" helm install rdma-netdev $manifests/chart --namespace kube-system
	check "the DaemonSet is rolled out on both nodes" own rollout status ds/rdma-netdev --timeout=600s

	step "kubectl rdma plan"
	ends 0 "a plan of both nodes" kubectl rdma plan --range 10.80.0.0/16
	printf '%s\n' "$checked" | tee "$LAB_OUT/values.yaml" >/tmp/values.yaml
	contains "both nodes are one group" '^# Group 1: node1, node2$' "$checked"
	contains "each rail has a half of the range" '10\.80\.128\.0/17' "$checked"
	equal "it does not warn" "" "$(grep -i warning <<<"$complained$checked" || true)"
	show cat /tmp/values.yaml
	check "rdmactl validate accepts it" rdmactl validate /tmp/values.yaml

	step "helm upgrade -f values.yaml"
	# The daemons get a value that no report may have.
	planted=planted-$RANDOM$RANDOM
	check "the API server takes it" helm upgrade rdma-netdev $manifests/chart --namespace kube-system -f /tmp/values.yaml \
		-f $manifests/chart/values/admission.yaml --set rdmaNodes.nodeCondition=true,rdmaNodes.taintMissing=true,rdmaNodes.nodeLabels=true \
		--set "extraEnv[0].name=RDMA_LAB_PLANTED" --set-string "extraEnv[0].value=$planted"
	check "the DaemonSet is rolled out on both nodes" own rollout status ds/rdma-netdev --timeout=600s
	check "both nodes offer their NICs" wait_for 300 both_offer rdma/nic "2 2"

	step "kubectl rdma verify --all"
	ends 0 "every node and rail is as it should be" kubectl rdma verify --all --html "$LAB_OUT/result.html"
	show cat <<<"$checked"
	tell "from helm install to the first result of verify: $((SECONDS - begun)) s"
	printf '%s\n' "$checked" >"$LAB_OUT/matrix"
	for node in node1 node2; do contains "$node has a row of two rates" "^$node +unknown [0-9.]+ Gb/s +unknown [0-9.]+ Gb/s" "$checked"; done
	# Soft RoCE has no line rate.
	contains "data is transferred by all four" '2 nodes, 2 rails: 4 unknown; 1 test in 1 round' "$checked"
	page=$(<"$LAB_OUT/result.html")
	contains "the page is whole" '^<!doctype html>' "$(head -c 15 "$LAB_OUT/result.html" | tr '[:upper:]' '[:lower:]')"
	contains "to its end" '</html>$' "$page"
	contains "and has the nodes" 'node2' "$page"
	equal "it loads nothing" "" "$(grep -Eio '(src|href)="?(https?:)?//[^>]*|@import|url\([^)]*' <<<"$page" || true)"
	check "the pods are gone" wait_for 200 none_of_verify
	check "both nodes offer their NICs as before" wait_for 100 both_offer rdma/nic "2 2"

	step "the same as objects: kubectl diff, of a configured cluster"
	ends 0 "objects instead of values" kubectl rdma plan --manifests --range 10.80.0.0/16
	printf '%s\n' "$checked" >/tmp/rdma.yaml
	check "rdmactl validate accepts them" rdmactl validate /tmp/rdma.yaml
	check "the API server takes them" kubectl apply -f /tmp/rdma.yaml
	check "the daemons go on with the NICs" wait_for 100 both_offer rdma/nic "2 2"
	kubectl rdma plan --manifests --range 10.80.0.0/16 >/tmp/again.yaml
	ends 0 "there is no difference" kubectl diff -f /tmp/again.yaml
	kubectl rdma plan --manifests --range 10.90.0.0/16 >/tmp/other.yaml
	ends 1 "another range differs" kubectl diff -f /tmp/other.yaml
	contains "by the ranges" '^\+.*10\.90\.128\.0/17' "$checked"
	show cat <<<"$checked"

	step "SIGINT"
	kubectl rdma verify --all >/tmp/stopped 2>&1 &
	verify=$!
	check "the pods are there" wait_for 200 some_of_verify
	kill -INT $verify
	rc=0
	wait $verify || rc=$?
	show cat /tmp/stopped
	equal "it ends with 1" 1 "$rc"
	contains "and says why" 'stopped by SIGINT' "$(</tmp/stopped)"
	check "the pods are gone" wait_for 200 none_of_verify
	check "both nodes offer their NICs as before" wait_for 200 both_offer rdma/nic "2 2"

	step "kubectl get rdmanodes"
	# shown NODE: how many HCAs of the resource its RdmaNode shows, expects, and says are healthy.
	shown() {
		kubectl get rdmanode "$1" -o json |
			jq -r '.status.resources[] | select(.name == "rdma/nic") | "\(.nics) \(.expected) \(.healthy)"'
	}
	is_shown() { [ "$(shown "$1")" = "$2" ]; }
	events_of() {
		kubectl --namespace default get events -o json --field-selector "involvedObject.kind=Node,involvedObject.name=$1" |
			jq -r '.items[] | "\(.reason): \(.message // .note)"'
	}
	ready_of() { kubectl get node "$1" -o json | jq -r '.status.conditions[] | select(.type == "RdmaReady").status'; }
	is_ready() { [ "$(ready_of "$1")" = "$2" ]; }
	for node in node1 node2; do
		check "$node shows two healthy NICs" wait_for 30 is_shown $node "2 2 2"
		check "$node has condition RdmaReady" wait_for 120 is_ready $node True
		equal "$node has a label for schedulers" 2 "$(kubectl get node $node -o json | jq -r '.metadata.labels["rdma-netdev.io/nics"]')"
	done
	show kubectl get nodes --show-labels
	show kubectl get rdmanodes
fi
meet_late checked

# A cable is out: the daemon does not offer the NIC, so no pod can test it.
[ "$LAB_GUEST" = 1 ] || machine set_link nic2 off
meet_late out
if [ "$LAB_GUEST" = 1 ]; then
	step "a cable of node2 is out"
	check "node2 offers one NIC" wait_for 200 both_offer rdma/nic "2 1"
	check "its RdmaNode shows one healthy NIC of two" wait_for 30 is_shown node2 "2 2 1"
	show kubectl get rdmanodes
	contains "an event of the Node says which" '^HcaUnhealthy: HCA .* is unhealthy: ' "$(events_of node2)"
	equal "nothing is wrong with node1" "2 2 2" "$(shown node1)"
	check "node2 is not RdmaReady, once that lasts" wait_for 120 is_ready node2 False
	equal "node1 is" True "$(ready_of node1)"
	ends 1 "kubectl rdma status says so" kubectl rdma status -o wide
	show cat <<<"$checked"
	contains "with the reason" '^node2: .* is DOWN' "$checked"
	ends 1 "verify --all finds it" kubectl rdma verify --all --json
	show cells
	contains "the cell of node2 and this rail fails" '^node2 rdma1 fail ' "$(cells)"
	for node in node1 node2; do contains "the other rail of $node is measured" "^$node rdma0 unknown [0-9.]+$" "$(cells)"; done
	contains "this rail of node1 has no partner" '^node1 rdma1 unknown null$' "$(cells)"
	contains "no other" '2 of 4 rails' "$complained"
	check "the pods are gone" wait_for 200 none_of_verify
fi
meet_late found
[ "$LAB_GUEST" = 1 ] || machine set_link nic2 on
meet_late in

# And while pods have the NICs.
if [ "$LAB_GUEST" = 1 ]; then
	step "a cable of node2 is pulled out while its pod has the NIC"
	check "both nodes offer their NICs" wait_for 200 both_offer rdma/nic "2 2"
	check "the RdmaNode of node2 shows both" wait_for 30 is_shown node2 "2 2 2"
	contains "so does an event" '^HcaHealthy: ' "$(events_of node2)"
	check "node2 is RdmaReady again" wait_for 120 is_ready node2 True
	: >/lab/sync/pull
	ends 1 "verify --all finds it" kubectl rdma verify --all --json
	show cells
	for node in node1 node2; do contains "the other rail of $node is measured" "^$node rdma0 unknown [0-9.]+$" "$(cells)"; done
	contains "the cell of node2 and this rail fails" '^node2 rdma1 fail ' "$(cells)"
	check "the pods are gone" wait_for 200 none_of_verify
else
	is_away() { [ ! -e /sys/class/net/eth2 ]; }
	ready() {
		kubectl get pods -l app.kubernetes.io/name=rdma-verify --field-selector=spec.nodeName=node2 -o json |
			jq -e '.items[].status.conditions[] | select(.type == "Ready" and .status == "True")'
	}
	wait_for 600 test -e /lab/sync/pull
	wait_for 600 is_away
	wait_for 300 ready
	machine set_link nic2 off
fi
meet_late pulled
[ "$LAB_GUEST" = 1 ] || machine set_link nic2 on

if [ "$LAB_GUEST" = 1 ]; then
	step "kubectl rdma report"
	kubectl create secret generic planted --from-literal=password="$planted"
	kubectl run user --image=localhost/rdma-tools:1 --restart=Never --env=PASSWORD="$planted" \
		--overrides='{"spec": {"automountServiceAccountToken": false, "containers": [{"name": "user", "image": "localhost/rdma-tools:1",
			"imagePullPolicy": "IfNotPresent", "command": ["sleep", "infinity"],
			"env": [{"name": "PASSWORD", "value": "'"$planted"'"}], "resources": {"limits": {"rdma/nic": "1"}}}]}}'
	check "a pod uses an HCA" kubectl wait --for=condition=Ready --timeout=300s pod/user
	ends 0 "an archive of everything" kubectl rdma report --timeout 300 /tmp/report.tar.gz
	show cat <<<"$checked"
	cp /tmp/report.tar.gz "$LAB_OUT/"
	python3 -c 'import sys, zlib; sys.stdout.buffer.write(zlib.decompress(open(sys.argv[1], "rb").read(), 31))' \
		/tmp/report.tar.gz >/tmp/report.tar
	for node in node1 node2; do
		for part in status pods discover topology preflight; do
			check "it has $part of $node" grep -aq "/nodes/$node/$part.json" /tmp/report.tar
		done
		check "it has the logs of $node" grep -aqE "/nodes/$node/logs/[^/]+/rdma-device-plugin.log" /tmp/report.tar
	done
	check "it has the plan's networks" grep -aq 10.80.128.0/17 /tmp/report.tar
	check "it names the variable" grep -aq RDMA_LAB_PLANTED /tmp/report.tar
	equal "but no planted secret" 0 "$(grep -ac "$planted" /tmp/report.tar || true)"
	equal "and no token" 0 "$(grep -aocE 'eyJhbGciOi[A-Za-z0-9_-]{20}|admin-token|node[12]-token' /tmp/report.tar || true)"
	check "the pod ends" kubectl delete pod user --now --timeout=200s

	step "kubectl delete"
	check "what was planned goes" kubectl delete -f /tmp/rdma.yaml --timeout=200s
	check "what was installed goes" helm uninstall rdma-netdev --namespace kube-system --wait
fi
meet_late over
as_before "the host is as before" "$before" state_without_indexes
meet_late end
