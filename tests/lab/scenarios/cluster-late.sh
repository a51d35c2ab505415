# Late binding on a whole real cluster: the example's pods get the NICs next to their GPUs, an MPIJob runs
# lab: topology=1x9x1 memory=2752 timeout=2400 images=mpi,node kubernetes=yes
# lab: cdi-containerd=yes
# lab: binaries=rdma-device-plugin,rdma-netdev,rdma-ipam,rdmactl standins=gpu-plugin-standin
# shellcheck shell=bash disable=SC2016,SC2154

# shellcheck source=tests/lab/guest/cluster.sh
. /lab/guest/cluster.sh
# Soft RoCE says 100 Gb/s of any faster NIC.
manifests=/tmp/manifests
cp -r /lab/manifests $manifests
sed -i 's/>=200G/>=100G/' $manifests/components/late/kustomization.yaml
mkdir $manifests/ours
cat >$manifests/ours/kustomization.yaml <<-'OURS'
	apiVersion: kustomize.config.k8s.io/v1beta1
	kind: Kustomization
	resources: [../base]
	components: [../components/late]
OURS
address=172.20.0.1

# eth0 is the node's own, with no GPU beside it. The others have a GPU beside each.
node_address $address
for class in "$(readlink -f /sys/class/net/eth0/device/../../..)"/*/*/class; do
	case $(<"$class") in 0x03*) echo 1 >"${class%/class}/remove" ;; esac
done
# What NVIDIA's driver has in procfs, of the other display devices.
mount -t tmpfs -o mode=755 nvidia /proc/driver
minor=0
for class in /sys/bus/pci/devices/*/class; do
	case $(<"$class") in 0x03*) ;; *) continue ;; esac
	gpu=$(basename "${class%/class}")
	mkdir -p "/proc/driver/nvidia/gpus/$gpu"
	printf 'Model: \t\t NVIDIA B200\nGPU UUID: \t GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16%d\nBus Location: \t %s\nDevice Minor: \t %d\n' \
		$minor "$gpu" $minor >"/proc/driver/nvidia/gpus/$gpu/information"
	minor=$((minor + 1))
done
for nic in 1 2 3 4 5 6 7 8; do
	make_hca eth$nic mlx5_$nic
	ip link set eth$nic mtu 9000
done
mount --make-rshared /
start_containerd /lab/containerd
ctr --namespace k8s.io image import /lab/node.tar
join_cluster $address
component gpu-plugin-standin --resource nvidia.com/gpu --nvidia /proc/driver/nvidia
check "the node offers eight GPUs" wait_for 200 offers nvidia.com/gpu 8

ln -s /lab/bin/rdmactl /usr/local/bin/kubectl-rdma
in_daemon() { own exec ds/rdma-netdev -c rdma-device-plugin -- rdmactl "$@"; }
# A NIC gets another index when the pod's namespace has one of that number.
state_without_indexes() { host_state | sed -E 's/^[0-9]+: //' | sort; }
for nic in 1 2 3 4 5 6 7 8; do wait_for 20 settled eth$nic; done
before=$(state_without_indexes)

step "kubectl apply -k, with the component late"
check "the API server takes it" kubectl apply -k $manifests/ours
check "the DaemonSet is rolled out" own rollout status ds/rdma-netdev --timeout=300s
check "the node offers eight slots" wait_for 200 offers rdma/nic 8

rows() { in_daemon pods --json | jq --arg pod "default/$1" '[.pods[] | select(.pod == $pod)]'; }
# interfaces POD: each RDMA interface with its IPv4 address.
interfaces() { in_pod "$1" ip -4 -o addr show | awk '$2 ~ /^rdma/ { sub("/.*", "", $4); print $2, $4 }'; }
# has POD COUNT: as many NICs as GPUs, each beside one; Multus and the container know them.
has() {
	local name ip of_rails='' known
	equal "$1: each of its $2 GPUs has a NIC on its switch" "$2" \
		"$(rows "$1" | jq '[.[].gpus[] | select(endswith(" PIX"))] | unique | length')"
	equal "$1: it has $2 interfaces" "$2" "$(interfaces "$1" | wc -l)"
	while read -r name ip; do
		[[ $ip == 10.$((64 + ${name#rdma})).* ]] || of_rails+=" $name $ip"
	done < <(interfaces "$1")
	equal "$1: each has an address of its rail" "" "$of_rails"
	known=$(kubectl get pod "$1" -o json | jq -r '.metadata.annotations["k8s.v1.cni.cncf.io/network-status"]')
	show cat <<<"$known"
	equal "$1: Multus reports them all" "$(interfaces "$1" | awk '{ print $2 }' | sort)" \
		"$(jq -r '.[] | select(.name == "default/rdma-near") | .ips[]' <<<"$known" | sort -u)"
	equal "$1: it has the nodes of $2 HCAs" "$2" "$(in_pod "$1" sh -c 'ls /dev/infiniband' | grep -c '^uverbs')"
	equal "$1: NCCL is told of them" "$2" "$(in_pod "$1" sh -c 'echo $NCCL_IB_HCA' | tr ',' '\n' | grep -c mlx5_)"
}

step "kubectl apply -k manifests/examples/late"
kubectl apply -f $manifests/examples/late/nad.yaml
check "the API server takes the pods" kubectl apply -f $manifests/examples/late/pods.yaml
check "those with one and four GPUs become ready" kubectl wait --for=condition=Ready --timeout=400s pod/late-1 pod/late-4
has late-1 1
has late-4 4
check "pods in the container, with stages" in_daemon pods -o wide
show cat <<<"$checked"
metrics() { (exec 3<>/dev/tcp/127.0.0.1/9834 && printf 'GET /metrics HTTP/1.0\r\n\r\n' >&3 && cat <&3); }
for pod in late-1 late-4; do
	contains "$pod: the columns GPUS, AGE and STAGE" \
		"^default/$pod +worker +rdma/nic +[0-9a-f:.]+ +[0-9a-f:.]+ PIX +rdma[0-7] +move +[0-9./]+ +[0-9]+[sm] +slot_[0-9a-f]+_[0-9] +attached " "$checked"
	contains "$pod: the metric of its alignment" \
		"^rdma_device_plugin_alignment\{resource=\"rdma/nic\",pod_namespace=\"default\",pod_name=\"$pod\"\} 1\.0" "$(metrics)"
done
check "they end" kubectl delete pod late-1 late-4 --timeout=200s
check "then that with eight becomes ready" kubectl wait --for=condition=Ready --timeout=400s pod/late-8
has late-8 8
equal "its rails are 0 to 7" "0 1 2 3 4 5 6 7" "$(interfaces late-8 | sed -E 's/rdma([0-9]).*/\1/' | sort | paste -sd' ')"
check "it ends" kubectl delete pod late-8 --timeout=200s

step "what kubectl describe pod shows of five refusals"
# network NAME KEYS: one of rdma-netdev with these keys.
network() {
	kubectl apply -f - <<-NAD
		apiVersion: k8s.cni.cncf.io/v1
		kind: NetworkAttachmentDefinition
		metadata: {name: $1, annotations: {k8s.v1.cni.cncf.io/resourceName: rdma/nic}}
		spec:
		  config: '{"cniVersion": "1.0.0", "name": "$1", "type": "rdma-netdev", $2}'
	NAD
}
# pod NAME NETWORKS LIMITS
pod() {
	kubectl apply -f - <<-POD
		apiVersion: v1
		kind: Pod
		metadata: {name: $1, annotations: {k8s.v1.cni.cncf.io/networks: "$2"}}
		spec:
		  terminationGracePeriodSeconds: 1
		  containers:
		  - name: main
		    image: localhost/mpi:1
		    imagePullPolicy: IfNotPresent
		    command: [sleep, infinity]
		    resources: {limits: $3}
	POD
}
described() { kubectl describe pod "$1" | sed -n '/^Events:/,$p'; }
# says POD PATTERN…: its events have them all.
says() {
	local events pattern
	events=$(described "$1")
	for pattern in "${@:2}"; do grep -Eq -- "$pattern" <<<"$events" || return 1; done
}
# says_why POD PATTERN…: the object, the reason, the remedy.
says_why() {
	if wait_for 300 says "$@"; then
		pass "$1: its events have object, reason and remedy"
	else
		fail "$1: its events have object, reason and remedy" "not all of: ${*:2}" "$(described "$1")"
	fi
	show sed -nE 's/.*(error adding container to network)/\1/p' <<<"$(described "$1")"
}
network uplink '"attach": "macvlan", "master": "eth0"'
network misspelt '"attach": "move", "devices": "all", "mut": 9000'
network foreign '"attach": "move", "device": "eth1"'
network small '"attach": "move", "devices": "all", "capabilities": {"deviceID": true},
	"ipam": {"type": "rdma-ipam", "range": "10.99.0.0/24", "range_start": "10.99.0.5", "range_end": "10.99.0.5"}'
pod denied uplink "{}"
pod wrong misspelt "{}"
pod stranger foreign "{}"
says_why denied 'network "uplink": ' 'on netdev eth0 is denied: ' 'set allow\.uplinks and list the netdevs'
says_why wrong 'network misspelt: unknown key' 'did you mean .*mtu' 'correct the key, or leave it out'
says_why stranger 'moving netdev eth1 is denied: pod default/stranger: ' 'the kubelet did not allocate [^ ]+ to it' \
	'request the resource of an exclusive pool'
check "a pod takes the only address of a range" pod first small "{rdma/nic: 1}"
check "it becomes ready" kubectl wait --for=condition=Ready --timeout=400s pod/first
pod second small "{rdma/nic: 1}"
says_why second 'pod default/second \(net1' '10\.99\.0\.0/24 is exhausted' 'enlarge the range'
kubectl delete pod second --timeout=200s
# One HCA is left, and eight GPUs ask for it: seven of them have a nearer one, which another pod has.
check "a pod takes all other HCAs but one" pod taker "" "{rdma/nic: 6}"
check "it becomes ready" kubectl wait --for=condition=Ready --timeout=400s pod/taker
pod late rdma-near "{rdma/nic: 1, nvidia.com/gpu: 8}"
says_why late 'of pod default/late ' 'the nearest free NIC for GPU [0-9] is .* pod default/taker .* has it' \
	'strict: false for this pool' 'delete it, and a new one may go elsewhere'
check "they all end" kubectl delete pod denied wrong stranger first taker late --timeout=300s
kubectl delete network-attachment-definitions uplink misspelt foreign small

step "pods that follow each other on the same HCAs, without a network"
ctr --namespace k8s.io events >"$LAB_OUT/events.log" &
# turn NAME: a pod with all GPUs and slots, which are bound when its container starts.
turn() {
	kubectl apply -f - <<-POD
		apiVersion: v1
		kind: Pod
		metadata: {name: $1}
		spec:
		  terminationGracePeriodSeconds: 1
		  containers:
		  - name: main
		    image: localhost/mpi:1
		    imagePullPolicy: IfNotPresent
		    command: [sleep, infinity]
		    resources: {limits: {rdma/nic: 8, nvidia.com/gpu: 8}}
	POD
}
container_of() { kubectl get pod "$1" -o json | jq -r '.status.containerStatuses[0].containerID | sub(".*//"; "")'; }
# at TOPIC CONTAINER: when its process started or ended, in seconds.
at() {
	local day time
	read -r day time _ < <(grep -F "/tasks/$1 " "$LAB_OUT/events.log" | grep "\"container_id\":\"$2\"" | grep -v '"id":"exec' | tail -n 1)
	date -u -d "$day $time" +%s.%N
}
# from A B: the seconds between.
from() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.2f", b - a }'; }
# warnings POD: what the kubelet could not do at once.
warnings() {
	kubectl get events --field-selector "involvedObject.name=$1,type=Warning" -o json |
		jq -r '.items[] | select(.reason | IN("FailedScheduling", "MissingClusterDNS") | not) | "\(.reason): \(.message)"'
}
# A pod that asks for all HCAs while one of them is Unhealthy, such as by a process that has not ended, has failed.
all_healthy() { in_daemon status --json | jq -e 'all(.daemon.pools[].hcas[]; .reasons == [])'; }
check "all returned NICs are healthy" wait_for 100 all_healthy
own logs ds/rdma-netdev -c rdma-device-plugin >"$LAB_OUT/rdma-device-plugin.log"
check "the first is made" turn turn-1
check "it becomes ready" kubectl wait --for=condition=Ready --timeout=400s pod/turn-1
equal "its bindings have its cgroup, found by its UID" "kubepods/besteffort/pod$(kubectl get pod turn-1 -o json | jq -r .metadata.uid)" \
	"$(jq -r '.cgroup // "none"' /run/rdma-netdev/bindings/* | sort -u)"
check "the node's RdmaNode knows its NICs" wait_for 100 eval '[ "$(kubectl rdma pods | grep -c "default/turn-1 .* PIX ")" = 8 ]'
show kubectl rdma pods
# health WORD: how many of its slots have this health in the pod's status (KEP-4680).
health() {
	kubectl get pod turn-1 -o json | jq --arg word "$1" '[.status.containerStatuses[].allocatedResourcesStatus[]?
		| select(.name == "rdma/nic").resources[] | select(.health == $word)] | length'
}
is_health() { [ "$(health "$1")" = "$2" ]; }
check "the pod's status has the health of its slots" wait_for 300 is_health Healthy 8
machine set_link nic3 off
check "that of one whose port goes down changes" wait_for 300 is_health Unhealthy 1
show kubectl rdma status || true
machine set_link nic3 on
check "and changes back" wait_for 300 is_health Healthy 8
wait_for 20 settled eth3
for next in 2 3 4; do
	ended=$(container_of turn-$((next - 1)))
	check "turn-$next waits for the HCAs" turn turn-$next
	check "turn-$((next - 1)) ends" kubectl delete pod turn-$((next - 1)) --timeout=200s
	check "turn-$next becomes ready" kubectl wait --for=condition=Ready --timeout=400s pod/turn-$next
	equal "its container started at the first try" "" "$(warnings turn-$next)"
	equal "with the nodes of eight HCAs" 8 "$(in_pod turn-$next sh -c 'ls /dev/infiniband' | grep -c '^uverbs')"
	ended=$(at exit "$ended")
	own logs ds/rdma-netdev -c rdma-device-plugin >"$LAB_OUT/rdma-device-plugin.log"
	free=$(grep "slot unbound.*turn-$((next - 1))" "$LAB_OUT/rdma-device-plugin.log" | tail -n 1 | cut -d' ' -f1)
	tell "    after the end of one container: HCAs free in $(from "$ended" "$(date -u -d "$free" +%s.%N)") s," \
		"next container started in $(from "$ended" "$(at start "$(container_of turn-$next)")") s"
done

step "the DaemonSet is rolled, and a container restarts meanwhile"
daemon() { own get pods -l app.kubernetes.io/name=rdma-netdev -o json |
	jq -r '.items[].status.containerStatuses[]? | select(.name == "rdma-device-plugin") | .containerID // "" | sub(".*//"; "")'; }
old=$(daemon)
restarted=$(container_of turn-4)
own rollout restart ds/rdma-netdev
has_ended() { grep -F '/tasks/exit ' "$LAB_OUT/events.log" | grep -q "\"container_id\":\"$1\""; }
check "the old daemon ends" wait_for 200 has_ended "$old"
ctr --namespace k8s.io tasks kill --signal SIGKILL "$restarted"
check "the DaemonSet is rolled out" own rollout status ds/rdma-netdev --timeout=300s
ended=$(at exit "$old")
# lists_since SECONDS: when the kubelet took lists of rdma/nic (klog has neither year nor zone).
lists_since() {
	gawk -v since="$1" '/"State pushed for device plugin" resource="rdma\/nic"/ {
		split($2, fraction, ".")
		time = mktime(gensub(/:/, " ", "g", strftime("%Y ") substr($1, 2, 2) " " substr($1, 4, 2) " " fraction[1]), 1) "." fraction[2]
		if (time > since) print time
	}' "$LAB_OUT/kubelet.log"
}
listed() { lists_since "$ended" | grep -q .; }
check "the kubelet has a list again" wait_for 100 listed
list=$(lists_since "$ended" | sed -n 1p)
started=$(at start "$(daemon)")
own logs ds/rdma-netdev -c rdma-device-plugin >"$LAB_OUT/rdma-device-plugin-2.log"
tell "    $(from "$ended" "$list") s from the old daemon's end to the new one's first list, of which the daemon itself $(from "$started" "$list") s"
is_another() { [ "$(container_of turn-4)" != "$restarted" ] && [ "$(kubectl get pod turn-4 -o json | jq '.status.containerStatuses[0].state | has("running")')" = true ]; }
check "the container runs again" wait_for 200 is_another
tell "    $(from "$(at exit "$restarted")" "$(at start "$(container_of turn-4)")") s from its end to its start"
equal "with the nodes of eight HCAs" 8 "$(in_pod turn-4 sh -c 'ls /dev/infiniband' | grep -c '^uverbs')"
check "it ends" kubectl delete pod turn-4 --timeout=200s

step "the MPIJob of manifests/examples/mpijob-cpu, as the MPI operator expands it"
of_example() { sed -nE "s/^ *$1: (.*)\$/\1/p" $manifests/examples/mpijob-cpu/kustomization.yaml; }
kubectl apply -f $manifests/examples/mpijob/nad.yaml
ctr --namespace k8s.io run --rm --mount type=bind,src=/tmp,dst=/tmp,options=rbind:rw localhost/mpi:1 key \
	ssh-keygen -q -t ed25519 -N '' -f /tmp/id
kubectl create secret generic netpipe-ssh --from-file=id_ed25519=/tmp/id \
	--from-file=id_ed25519.pub=/tmp/id.pub --from-file=authorized_keys=/tmp/id.pub
kubectl create configmap netpipe-config \
	--from-literal=hostfile="$(printf 'netpipe-worker-%d.netpipe.default.svc slots=1\n' 0 1)"
# mpi_pod NAME COMMAND [NETWORKS LIMITS ALIASES]
mpi_pod() {
	local networks=${3:+"k8s.v1.cni.cncf.io/networks: \"$3\""}
	kubectl apply -f - <<-POD
		apiVersion: v1
		kind: Pod
		metadata:
		  name: $1
		  annotations: {$networks}
		spec:
		  restartPolicy: Never
		  terminationGracePeriodSeconds: 1
		  hostAliases: ${5:-"[]"}
		  containers:
		  - name: main
		    image: localhost/mpi:1
		    imagePullPolicy: IfNotPresent
		    command: [sh, -c, "$2"]
		    env:
		    - {name: OMPI_MCA_orte_default_hostfile, value: /etc/mpi/hostfile}
		    - {name: OMPI_MCA_plm_rsh_args, value: -o ConnectionAttempts=10}
		    securityContext: {capabilities: {add: [IPC_LOCK]}}
		    resources: {limits: ${4:-"{}"}}
		    volumeMounts:
		    - {name: ssh, mountPath: /root/.ssh}
		    - {name: mpi, mountPath: /etc/mpi}
		  volumes:
		  - {name: ssh, secret: {secretName: netpipe-ssh, defaultMode: 0400}}
		  - {name: mpi, configMap: {name: netpipe-config}}
	POD
}
aliases=''
for worker in netpipe-worker-0 netpipe-worker-1; do
	check "$worker is made" mpi_pod $worker \
		"ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key && exec /usr/sbin/sshd -De" \
		rdma-worker "$(of_example limits)"
done
check "both workers become ready" kubectl wait --for=condition=Ready --timeout=400s pod/netpipe-worker-0 pod/netpipe-worker-1
for worker in netpipe-worker-0 netpipe-worker-1; do
	equal "$worker has two HCAs" 2 "$(in_pod $worker ibv_devinfo | grep -c hca_id)"
	aliases+="{ip: $(address_of $worker eth0), hostnames: [$worker.netpipe.default.svc]}, "
done
check "the launcher is made" mpi_pod netpipe-launcher "exec sleep infinity" "" "{}" "[$aliases]"
check "it becomes ready" kubectl wait --for=condition=Ready --timeout=400s pod/netpipe-launcher
# The example's arguments; mpi.sh says what differs on an emulated machine with soft RoCE.
mapfile -t arguments < <(sed -n '/^ *- mpirun$/,/- op:/{/- mpirun/d; /- op:/d; s/^ *- //; s/"//g; p}' \
	$manifests/examples/mpijob-cpu/kustomization.yaml)
check "mpirun runs NetPIPE on both workers, by their full names" timeout 400 kubectl exec netpipe-launcher -- \
	mpirun -x UCX_UD_VERBS_ETH_DGID_CHECK=n "${arguments[@]/8388608/65536}" -n 3 -p 0
contains "its table has the largest size" ' 65536 bytes +3 times --> +[0-9.]+ Mbps in ' "$checked"
show cat <<<"$checked"
check "verify between the workers finds nothing wrong" \
	rdmactl verify --timeout 120 --only ping,rping pod:netpipe-worker-0 pod:netpipe-worker-1
check "the job's pods end" kubectl delete pod netpipe-launcher netpipe-worker-0 netpipe-worker-1 --timeout=200s

step "kubectl delete -k"
kubectl delete secret/netpipe-ssh configmap/netpipe-config
kubectl delete -f $manifests/examples/late/nad.yaml -f $manifests/examples/mpijob/nad.yaml
# As profile uninstall does: a document with parts stays, and with it its definition.
given_back() {
	own exec ds/rdma-netdev -c rdma-agent -- rdmactl addresses give-back && [ -z "$(kubectl get addresssubnets -o name)" ]
}
check "the node gives its addresses back" wait_for 200 given_back
check "what was installed goes" kubectl delete -k $manifests/ours --timeout=200s
as_before "the host is as before" "$before" state_without_indexes
equal "no lease is left" "[]" "$(rdmactl addresses --json | jq -c .leases)"
