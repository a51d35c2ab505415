# Kubeflow's MPI operator on a whole real cluster of two nodes: MPIJobs over RDMA, with a worker that is Pending at first
# lab: guests=2 nics=5 memory=3072 cpus=2 timeout=3600 images=mpi,node kubernetes=yes dns=yes
# lab: peers=mpi-operator,mpi-operator.yaml
# lab: binaries=rdma-device-plugin,rdma-netdev,rdma-ipam,rdma-agent,rdmactl
# shellcheck shell=bash disable=SC2016,SC2154

# shellcheck source=tests/lab/guest/cluster.sh
. /lab/guest/cluster.sh
manifests=/tmp/manifests
cp -r /lab/manifests $manifests
hcas=(mlx5_0 mlx5_1 mlx5_2 mlx5_3)

# eth0 is the node's own, the others are NICs for pods.
node_address "172.20.0.$LAB_GUEST"
for nic in 0 1 2 3; do
	ip link set "eth$((nic + 1))" name "rdma$nic"
	make_hca "rdma$nic" "${hcas[nic]}"
	ip link set "rdma$nic" mtu 9000
	wait_for 20 settled "rdma$nic"
done
mount --make-rshared /
start_containerd
ctr --namespace k8s.io image import /lab/node.tar
meet booted
join_cluster "172.20.0.$LAB_GUEST"
meet_late joined
# A NIC that comes back from a pod has another index.
state_without_indexes() { host_state | sed -E 's/^[0-9]+: //; s/ netdev_index [0-9]+//' | sort; }
before=$(state_without_indexes)

offered() { kubectl get nodes -o json | jq -r --arg resource "$1" '[.items[].status.allocatable[$resource] // "0"] | join(" ")'; }
both_offer() { [ "$(offered "$1")" = "$2" ]; }
# blocker NODE NICS: a pod that holds so many there.
blocker() {
	kubectl apply -f - <<-POD
		apiVersion: v1
		kind: Pod
		metadata: {name: blocker-$1}
		spec:
		  terminationGracePeriodSeconds: 1
		  nodeSelector: {kubernetes.io/hostname: $1}
		  containers:
		  - name: main
		    image: localhost/mpi:1
		    imagePullPolicy: IfNotPresent
		    command: [sleep, infinity]
		    resources: {limits: {rdma/nic: $2}}
	POD
}
workers_of() { kubectl get pods -l "training.kubeflow.org/job-name=$1,training.kubeflow.org/job-role=worker" -o json; }
# workers_are JOB PHASE…: the workers' phases, in any order.
workers_are() { [ "$(workers_of "$1" | jq -r '[.items[].status.phase] | sort | join(" ")')" = "${*:2}" ]; }
# networks_of POD: interface and address of each RDMA network, as Multus reports it.
networks_of() {
	kubectl get pod "$1" -o json | jq -r '.metadata.annotations["k8s.v1.cni.cncf.io/network-status"] | fromjson[]
		| select(.name == "default/rdma-worker") | "\(.interface) \(.ips | join(","))"'
}
condition_of() { kubectl get mpijob "$1" -o json | jq -r --arg type "$2" '.status.conditions[]? | select(.type == $type).status'; }
has_condition() { [ "$(condition_of "$1" "$2")" = True ]; }
# succeeds JOB: it does; what there is of it is kept, and shown if it does not.
succeeds() {
	check "$1 succeeds" wait_for 900 has_condition "$1" Succeeded
	kubectl logs "job/$1-launcher" >"$LAB_OUT/$1.log" 2>&1 || true
	{ kubectl get mpijobs,jobs,pods,services,endpointslices,events -o yaml || true; } >"$LAB_OUT/$1.yaml"
	if has_condition "$1" Succeeded; then show tail -n 3 "$LAB_OUT/$1.log"; else lab_diag <"$LAB_OUT/$1.log"; fi
}
gone() { ! kubectl get "$@"; }
no_pods() { [ -z "$(kubectl get pods -o name)" ]; }
# received: packets of RoCE that each HCA of this node received.
received() {
	local hca
	for hca in "${hcas[@]}"; do cat "/sys/class/infiniband/$hca/ports/1/hw_counters/rcvd_pkts"; done
}
mapfile -t at_first < <(received)

if [ "$LAB_GUEST" = 1 ]; then
	step "the operator, with the rights of its own account"
	check "its objects" kubectl apply --server-side -f /lab/peers/mpi-operator.yaml
	check "the definition is in force" kubectl wait --for=condition=Established --timeout=200s crd/mpijobs.kubeflow.org
	kubectl config view --raw >/run/cluster/mpi-operator
	kubectl --kubeconfig /run/cluster/mpi-operator config set-credentials me \
		--token "$(kubectl --namespace mpi-operator create token mpi-operator --duration=24h)"
	# A process of this node instead of a Deployment's pod. Like that, it is started again: it ends when it cannot renew its
	# lease within five seconds.
	cp /lab/peers/mpi-operator /usr/local/bin/
	while true; do
		KUBECONFIG=/run/cluster/mpi-operator mpi-operator -alsologtostderr --lock-namespace=mpi-operator || nap 1
	done >>"$LAB_OUT/mpi-operator.log" 2>&1 &

	step "helm install -f values/exclusive.yaml"
	check "the API server takes the chart" helm install rdma-netdev $manifests/chart --namespace kube-system -f $manifests/chart/values/exclusive.yaml
	check "the DaemonSet is rolled out on both nodes" own rollout status ds/rdma-netdev --timeout=600s
	check "both nodes offer their NICs" wait_for 300 both_offer rdma/nic "4 4"

	step "all MPIJobs of the examples, by the operator's schema"
	known=0
	for example in $manifests/examples/*/; do
		kubectl kustomize "$example" >/tmp/example.yaml
		grep -q '^kind: MPIJob' /tmp/example.yaml || continue
		known=$((known + 1))
		check "$(basename "$example")" kubectl apply --dry-run=server --validate=strict -f /tmp/example.yaml
	done
	check "they are five or more" test $known -ge 5
	refuses "a key that it does not have" 'unknown field "spec.slotsPerNode"' \
		kubectl apply --dry-run=server --validate=strict -f <(sed 's/slotsPerWorker/slotsPerNode/' $manifests/examples/mpijob/mpijob.yaml)

	step "manifests/examples/mpijob-cpu, while node1 has two NICs free and node2 has one"
	for node in 1 2; do check "a pod takes $((node + 1)) NICs of node$node" blocker node$node $((node + 1)); done
	check "they run" kubectl wait --for=condition=Ready --timeout=400s pod/blocker-node1 pod/blocker-node2
	mkdir $manifests/ours-cpu
	# mpi.sh says why soft RoCE needs these variables, and smaller messages.
	cat >$manifests/ours-cpu/kustomization.yaml <<-'OURS'
		apiVersion: kustomize.config.k8s.io/v1beta1
		kind: Kustomization
		resources: [../examples/mpijob-cpu]
		patches:
		- target: {kind: MPIJob, name: netpipe}
		  patch: |
		    - {op: test, path: /spec/mpiReplicaSpecs/Launcher/template/spec/containers/0/command/12, value: "8388608"}
		    - {op: replace, path: /spec/mpiReplicaSpecs/Launcher/template/spec/containers/0/command/12, value: "262144"}
		    - {op: add, path: /spec/mpiReplicaSpecs/Launcher/template/spec/containers/0/command/-, value: "-n"}
		    - {op: add, path: /spec/mpiReplicaSpecs/Launcher/template/spec/containers/0/command/-, value: "3"}
		    - {op: add, path: /spec/mpiReplicaSpecs/Launcher/template/spec/containers/0/command/-, value: "-p"}
		    - {op: add, path: /spec/mpiReplicaSpecs/Launcher/template/spec/containers/0/command/-, value: "0"}
		    - {op: add, path: /spec/mpiReplicaSpecs/Launcher/template/spec/containers/0/command/1, value: UCX_RNDV_THRESH=16384}
		    - {op: add, path: /spec/mpiReplicaSpecs/Launcher/template/spec/containers/0/command/1, value: "-x"}
		    - {op: add, path: /spec/mpiReplicaSpecs/Launcher/template/spec/containers/0/command/1, value: UCX_UD_VERBS_ETH_DGID_CHECK=n}
		    - {op: add, path: /spec/mpiReplicaSpecs/Launcher/template/spec/containers/0/command/1, value: "-x"}
	OURS
	check "the API server takes it" kubectl apply -k $manifests/ours-cpu
	check "one worker runs, one is Pending" wait_for 400 workers_are netpipe Pending Running
	running=$(workers_of netpipe | jq -r '.items[] | select(.status.phase == "Running").metadata.name')
	pending=$(workers_of netpipe | jq -r '.items[] | select(.status.phase == "Pending").metadata.name')
	contains "for lack of NICs" 'Insufficient rdma/nic' \
		"$(kubectl get pod "$pending" -o json | jq -r '.status.conditions[] | select(.type == "PodScheduled").message')"
	check "the operator waits with the launcher" gone job netpipe-launcher
	check "$running becomes ready" kubectl wait --for=condition=Ready --timeout=400s "pod/$running"
	# The number in an interface's name is the NIC's rail.
	two='^(net1-[0-3] 192\.168\.114\.[0-9]+ ){2}$'
	contains "$running: both NICs have an address of the range" "$two" "$(networks_of "$running" | tr '\n' ' ')"
	equal "$running: its interfaces have what Multus reports" "$(networks_of "$running" | sort)" \
		"$(in_pod "$running" ip -4 -o addr show | awk '$2 ~ /^net1-/ { sub("/.*", "", $4); print $2, $4 }' | sort)"
	equal "it has two HCAs" 2 "$(in_pod "$running" ibv_devinfo | grep -c hca_id)"
	# The launcher finds the workers by these names. The endpoints of a worker come when it is ready.
	check "it has its name in the DNS" wait_for 100 in_pod "$running" ping -c 1 "$running.netpipe.default.svc"
	refuses "the other does not" 'Name or service not known' in_pod "$running" ping -c 1 "$pending.netpipe.default.svc"
	equal "the Service has the ready worker only" "$(address_of "$running" eth0)" \
		"$(kubectl get endpointslices -l kubernetes.io/service-name=netpipe -o json | jq -r '.items[].endpoints[]?.addresses[]')"
	check "the pod of node2 ends" kubectl delete pod blocker-node2 --timeout=200s
	check "both workers run" wait_for 400 workers_are netpipe Running Running
	equal "one on each node" "node1 node2" "$(workers_of netpipe | jq -r '[.items[].spec.nodeName] | sort | join(" ")')"
	other=$(networks_of "$pending")
	contains "$pending: both NICs have an address of the range" "$two" "$(tr '\n' ' ' <<<"$other")"
	equal "the four addresses differ" 4 "$(printf '%s\n' "$other" "$(networks_of "$running")" | awk '{ print $2 }' | sort -u | wc -l)"
	succeeds netpipe
	contains "NetPIPE's table has the largest size" ' 262144 bytes +3 times --> +[0-9.]+ Mbps in ' "$(<"$LAB_OUT/netpipe.log")"
	# One trial of each size; NetPIPE makes several.
	awk '/ Mbps in / { bytes += $2 * $4 } END { print bytes + 0 }' "$LAB_OUT/netpipe.log" >/lab/sync/bytes
fi
meet_late measured
mapfile -t at_last < <(received)
bytes=$(</lab/sync/bytes) packets=0 gained=()
for nic in 0 1 2 3; do
	more=$((at_last[nic] - at_first[nic]))
	[ $more = 0 ] || gained+=("$more")
	packets=$((packets + more))
done
echo "the table's messages: $bytes bytes; packets: ${gained[*]}"
equal "two HCAs of this node received RDMA" 2 ${#gained[@]}
# A packet of RoCE holds up to 4096 bytes at an MTU of 9000. UCX splits messages of UCX_RNDV_THRESH bytes or more.
check "they received the table's messages" test $((packets * 4096)) -gt "$bytes"
for more in "${gained[@]}"; do check "one received $more of $packets packets: a quarter or more" test $((4 * more)) -ge $packets; done

if [ "$LAB_GUEST" = 1 ]; then
	check "cleanPodPolicy: the operator deletes the workers" wait_for 300 workers_are netpipe
	equal "the launcher's pod stays" Succeeded \
		"$(kubectl get pods -l training.kubeflow.org/job-name=netpipe,training.kubeflow.org/job-role=launcher -o json | jq -r '.items[].status.phase')"
	check "the job and the other pod go" kubectl delete mpijob/netpipe pod/blocker-node1 --timeout=200s
	check "with the job's Service" wait_for 200 gone service netpipe
	check "no pod is left" wait_for 200 no_pods
fi
meet_late ended
for nic in 0 1 2 3; do wait_for 100 settled rdma$nic; done
as_before "the node's NICs are as before" "$before" state_without_indexes
meet_late returned

if [ "$LAB_GUEST" = 1 ]; then
	step "manifests/examples/mpijob-rails, on four rails and without GPUs"
	mkdir $manifests/ours-rails
	# The nodes have four NICs instead of eight, and the network's ranges must be as many. all_reduce_perf needs GPUs:
	# each rank tells its rails instead, and waits.
	sed -i -E '/"[4-7]": \{ "range"/d; s/("3": \{ "range".*),$/\1/' $manifests/examples/mpijob-rails/kustomization.yaml
	cat >$manifests/ours-rails/kustomization.yaml <<-'OURS'
		apiVersion: kustomize.config.k8s.io/v1beta1
		kind: Kustomization
		resources: [../examples/mpijob-rails]
		patches:
		- target: {kind: MPIJob, name: nccl-all-reduce}
		  patch: |
		    - {op: test, path: /spec/slotsPerWorker, value: 8}
		    - {op: replace, path: /spec/slotsPerWorker, value: 4}
		    - {op: test, path: /spec/mpiReplicaSpecs/Launcher/template/spec/containers/0/command/3, value: "16"}
		    - {op: replace, path: /spec/mpiReplicaSpecs/Launcher/template/spec/containers/0/command/3, value: "8"}
		    - {op: test, path: /spec/mpiReplicaSpecs/Launcher/template/spec/containers/0/command/16, value: all_reduce_perf}
		    - {op: replace, path: /spec/mpiReplicaSpecs/Launcher/template/spec/containers/0/command/16, value: sh}
		    - {op: replace, path: /spec/mpiReplicaSpecs/Launcher/template/spec/containers/0/command/17, value: "-c"}
		    - op: replace
		      path: /spec/mpiReplicaSpecs/Launcher/template/spec/containers/0/command/18
		      value: |
		        echo "rank $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE:" $(ip -4 -o addr show | sed -nE 's/.* (rdma[0-9]) +inet ([0-9.]+).*/\1=\2/p')
		        until [ -e /dev/shm/go ]; do sleep 1; done
		    - {op: replace, path: /spec/mpiReplicaSpecs/Launcher/template/spec/containers/0/image, value: "localhost/mpi:1"}
		    - {op: replace, path: /spec/mpiReplicaSpecs/Worker/template/spec/containers/0/image, value: "localhost/mpi:1"}
		    - {op: replace, path: /spec/mpiReplicaSpecs/Worker/template/spec/containers/0/resources, value: {limits: {rdma/nic: 4}}}
	OURS
	check "the API server takes it" kubectl apply -k $manifests/ours-rails
	check "both workers run" wait_for 400 workers_are nccl-all-reduce Running Running
	ranks() { kubectl logs job/nccl-all-reduce-launcher | grep '^rank '; }
	all_ranks() { [ "$(ranks | wc -l)" = 8 ]; }
	check "mpirun starts eight ranks" wait_for 600 all_ranks
	show ranks
	for rail in 0 1 2 3; do
		equal "rail $rail: both workers have an address of its subnet" 2 "$(ranks | grep -Eo "rdma$rail=10\.$((64 + rail))\.[0-9.]+" | sort -u | wc -l)"
	done
	equal "four ranks on each node" "4 4" "$(ranks | cut -d: -f2 | sort | uniq -c | awk '{ print $1 }' | paste -sd' ')"
	check "verify: RDMA works between the workers" \
		rdmactl verify --timeout 200 --only ping,rping pod:nccl-all-reduce-worker-0 pod:nccl-all-reduce-worker-1
	show cat <<<"$checked"
	contains "by rping" 'rping +pass' "$checked"
	for worker in 0 1; do in_pod nccl-all-reduce-worker-$worker sh -c ': >/dev/shm/go'; done
	succeeds nccl-all-reduce
	check "the operator deletes the workers" wait_for 300 workers_are nccl-all-reduce
	check "the job goes" kubectl delete -k $manifests/ours-rails --timeout=200s
	check "no pod is left" wait_for 200 no_pods
fi
meet_late over
for nic in 0 1 2 3; do wait_for 100 settled rdma$nic; done
as_before "the node's NICs are as before" "$before" state_without_indexes
equal "no lease is left" "[]" "$(rdmactl addresses --json | jq -c .leases)"
