# Broken NICs of a node of a whole real cluster: its RdmaNode, events, condition, taint and metric, how late and in how many writes
# lab: guests=2 nics=4 memory=3072 cpus=2 timeout=5400 images=pods,node kubernetes=yes
# lab: cdi-containerd=yes
# lab: binaries=rdma-device-plugin,rdma-netdev,rdma-ipam,rdma-agent,rdmactl
# shellcheck shell=bash disable=SC2016,SC2154

# shellcheck source=tests/lab/guest/cluster.sh
. /lab/guest/cluster.sh
manifests=/lab/manifests

# eth0 is the node's own, the others are HCAs for pods; a NIC may be gone after a reset.
node_address "172.20.0.$LAB_GUEST"
for nic in 1 2 3; do
	[ -e /sys/class/net/eth$nic ] || continue
	make_hca eth$nic mlx5_$nic
done
mount --make-rshared /
start_containerd /lab/containerd
ctr --namespace k8s.io image import /lab/node.tar
meet booted
join_cluster "172.20.0.$LAB_GUEST"
meet_late joined

rolled_out() { own rollout status ds/rdma-netdev --timeout=600s; }
if [ "$LAB_GUEST" = 1 ]; then
	cat >/tmp/values.yaml <<-'VALUES'
		pools:
		  version: 1
		  pools:
		  - {resource: rdma/nic, mode: exclusive, select: {linkTypes: [ether], ifNames: [eth1, eth2, eth3]}}
		rdmaNodes: {nodeCondition: true, taintMissing: true}
		admission: {enabled: true}
	VALUES
	check "the API server takes the chart" helm install rdma-netdev $manifests/chart --namespace kube-system -f /tmp/values.yaml
	check "the DaemonSet is rolled out on both nodes" rolled_out
	meet_late installed
	wait_for 5000 test -e /lab/sync/over
	equal "nothing was ever wrong with the other node" "" \
		"$(kubectl --namespace default get events -o json --field-selector involvedObject.kind=Node,involvedObject.name=node1 |
			jq -r '.items[] | select(.reason | startswith("Hca")) | .message // .note')"
	return 0
fi
meet_late installed

milliseconds() { date +%s%3N; }
# The versions of the object, of the Node's condition and taint, as one who watches is told them: each line is
# one change, with the time at which it came.
told() { while IFS= read -r line; do echo "$(milliseconds) $line"; done; }
watch_all() {
	kubectl get rdmanode node2 --watch -o jsonpath='{.status.resources[0].healthy}/{.status.resources[0].expected} {.status.problems}{"\n"}' |
		told >/run/versions &
	kubectl get node node2 --watch -o jsonpath='{.status.conditions[?(@.type=="RdmaReady")].status} {.spec.taints[?(@.key=="rdma-netdev.io/missing")].effect}{"\n"}' |
		told >/run/marks &
	wait_for 60 test -s /run/versions
	wait_for 60 test -s /run/marks
}
# cause: what happens from now on.
cause() { had=$(wc -l </run/versions) had_marks=$(wc -l </run/marks) begun=$(milliseconds); }
since() { tail -n "+$((had + 1))" /run/versions; }
# marks: the changes of condition and taint since then; a Node is written for other reasons, too.
marks() { tail -n "+$had_marks" /run/marks | cut -d' ' -f2- | uniq | tail -n +2; }
# shows PATTERN: a version since then does.
shows() { grep -Eq "$1" <<<"$(since | cut -d' ' -f2-)"; }
# becomes DESCRIPTION PATTERN: the object does, and tells after how long.
becomes() {
	check "$1" wait_for 100 shows "$2"
	tell "    the RdmaNode shows it $(($(since | grep -Em1 "^[0-9]+ $2" | cut -d' ' -f1) - begun)) ms after the cause"
}
# writes: so many since the cause. Once nothing more comes.
writes() {
	nap 12
	since | wc -l
}
is_ready() { [ "$(tail -n 1 /run/marks | cut -d' ' -f2)" = "$1" ]; }
is_tainted() { [ "$(tail -n 1 /run/marks | cut -d' ' -f3)" = "$1" ]; }
events() {
	kubectl --namespace default get events -o json --field-selector involvedObject.kind=Node,involvedObject.name=node2 |
		jq -r '.items[] | select(.reason | startswith("Hca")) | "\(.reason): \(.message // .note)"'
}
event() { grep -Eq "$1" <<<"$(events)"; }
metrics() { (exec 3<>/dev/tcp/127.0.0.1/"$1" && printf 'GET /metrics HTTP/1.0\r\n\r\n' >&3 && cat <&3); }
carrier() { [ "$(<"/sys/class/net/$1/carrier")" = "$2" ]; }
# cable NIC on|off: by the kernel's word.
cable() {
	machine set_link "nic$1" "$2"
	wait_for 20 carrier "eth$1" "$([ "$2" = on ] && echo 1 || echo 0)"
}

check "node2 offers three NICs" wait_for 300 offers rdma/nic "$(was_reset && echo 2 || echo 3)"
watch_all

if ! was_reset; then
	check "its RdmaNode shows three" wait_for 100 grep -q ' 3/3' /run/versions
	check "it has condition RdmaReady" wait_for 120 is_ready True

	step "a cable is out"
	cause
	cable 2 off
	becomes "the object names the port" '2/3 .*is DOWN'
	equal "in one write" 1 "$(writes)"
	check "an event of the Node says which" event '^HcaUnhealthy: HCA .* is unhealthy: .*DOWN'
	check "the Node is not RdmaReady, once that lasts" wait_for 120 is_ready False
	tell "    the condition is False $(($(milliseconds) - begun)) ms after the cause"
	contains "the metric has the reason" 'hca_unhealthy\{.*rdma_device="mlx5_2".*\} 1' "$(metrics 9834 | grep hca_unhealthy)"

	step "the cable is in again"
	cause
	cable 2 on
	becomes "the object shows three healthy NICs" '3/3 '
	# The port comes up, and a second later the HCA is healthy (health.upDelay).
	check "in one write for each change" test "$(writes)" -le 2
	check "so does an event" event '^HcaHealthy: '
	check "the Node is RdmaReady again" wait_for 120 is_ready True

	step "a port flaps: twenty times in a minute"
	cause
	for _ in 1 2 3 4 5 6 7 8 9 10; do
		cable 2 off
		nap 3
		cable 2 on
		nap 3
	done
	flapped=$(milliseconds)
	check "the object shows it healthy again" wait_for 100 eval 'tail -n 1 /run/versions | grep -q " 3/3"'
	tell "    $(($(milliseconds) - flapped)) ms after the last change of the port"
	tell "    $(writes) writes for 20 changes of the port in $((flapped - begun)) ms, of which one who watches saw:"
	show since
	check "no more than one each five seconds" test "$(since | wc -l)" -le $(((flapped - begun) / 5000 + 3))
	check "the Node is RdmaReady" wait_for 120 is_ready True
	show marks
	check "its condition changed at most once and back" test "$(marks | wc -l)" -le 2
	equal "it has events: one of each kind in ten minutes" "HcaHealthy HcaUnhealthy" \
		"$(events | cut -d: -f1 | sort | uniq -c | awk '$1 <= 2 { print $2 }' | xargs)"

	step "a process of an ended pod hangs with its HCA"
	kubectl apply -f - <<-'POD'
		apiVersion: v1
		kind: Pod
		metadata: {name: stuck}
		spec:
		  nodeName: node2
		  automountServiceAccountToken: false
		  restartPolicy: Never
		  containers:
		  - name: main
		    image: localhost/rdma-tools:1
		    imagePullPolicy: IfNotPresent
		    command: [sh, -c, 'node=$(ls -d /dev/infiniband/uverbs*); ibv_rc_pingpong -d "$(cat /sys/class/infiniband_verbs/${node##*/}/ibdev)"']
		    securityContext: {capabilities: {add: [IPC_LOCK]}}
		    resources: {limits: {rdma/nic: "1"}}
	POD
	check "a pod has an HCA" kubectl wait --for=condition=Ready --timeout=300s pod/stuck
	process_of() { rdma resource show ctx | sed -n 's/.* pid \([0-9]*\) .*/\1/p'; }
	has_one() { [ "$(process_of | wc -l)" = 1 ]; }
	check "its process has a context of it" wait_for 60 has_one
	process=$(process_of)
	freezer=/run/freezer
	mkdir -p $freezer
	mount -t cgroup -o freezer freezer $freezer
	mkdir $freezer/hung
	echo "$process" >$freezer/hung/cgroup.procs
	echo FROZEN >$freezer/hung/freezer.state
	cause
	check "the cluster forgets the pod" kubectl delete pod stuck --force --grace-period=0
	becomes "the object says that the HCA is in use" '2/3 .*process'
	show tail -n 1 /run/versions
	check "an event of the Node says by what" event '^HcaInUse: HCA .*process [0-9]+'
	check "the Node is not RdmaReady, once that lasts" wait_for 120 is_ready False
	cause
	echo THAWED >$freezer/hung/freezer.state
	becomes "when the process has ended, the HCA is healthy" '3/3 '
	check "the Node is RdmaReady again" wait_for 120 is_ready True

	step "a NIC is unplugged"
	cause
	machine device_del nic3
	becomes "the object names it" '2/3 .*'
	show since
	equal "in one write" 1 "$(writes)"
	check "the kubelet offers two" wait_for 60 offers rdma/nic 2
	show events
	step "the node boots without it"
	reset
fi

step "the node is back without the NIC"
check "the DaemonSet is rolled out again" rolled_out
check "the object says that it is missing" wait_for 200 eval 'tail -n 1 /run/versions | grep -Eq " 2/3 .*missing since"'
show kubectl get rdmanodes
check "an event of the Node says so" event '^HcaMissing: HCA .* missing since'
check "the Node is not RdmaReady" wait_for 120 is_ready False
check "it has the taint" wait_for 120 is_tainted NoSchedule
contains "the metric is there without the API" 'hca_missing\{.*\} 1' "$(metrics 9834 | grep hca_missing)"
ln -sf /lab/bin/rdmactl /usr/local/bin/kubectl-rdma
show eval "kubectl rdma status || true"

step "ten minutes in which nothing happens"
nap 12
cause
before=$(metrics 9836 | grep node_object_writes)
nap 600
equal "nothing is written to the object" "" "$(since)"
equal "by the agent's word, too" "$before" "$(metrics 9836 | grep node_object_writes)"

step "an administrator says that it does not come back"
daemon=$(own get pods -l app.kubernetes.io/name=rdma-netdev --field-selector spec.nodeName=node2 -o name)
missing=$(kubectl get rdmanode node2 -o json | jq -r '.status.missing[0].id')
cause
check "rdmactl forget" own exec "$daemon" -c rdma-device-plugin -- rdmactl forget "$missing"
becomes "the object expects two" '2/2 '
check "the Node is RdmaReady" wait_for 120 is_ready True
check "it has no taint" wait_for 120 is_tainted ""
: >/lab/sync/over
