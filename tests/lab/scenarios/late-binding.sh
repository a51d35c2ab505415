# Late binding on a container runtime: pods get the NICs beside their GPUs by CDI, whatever dies on the way
# lab: topology=1x2x2 memory=1792 timeout=1500 images=pods cdi-containerd=yes
# lab: binaries=rdma-device-plugin,rdma-netdev,rdma-ipam,rdmactl standins=kubelet-standin,multus-standin,gpu-plugin-standin
# shellcheck shell=bash disable=SC2016,SC2154

networks=/lab/manifests/examples/networks
cdi=/var/run/cdi
socket=/run/rdma-netdev/node.sock
# The first HCA is none of the pool's, and goes away: the numbers of device nodes change with the
# first move, as they are given anew (ib_uverbs_add_one, the lowest that is free).
load_rdma
ip link add other type dummy
ip link set other up
rdma link add other type rxe netdev other
for nic in 0 1 2 3; do
	make_hca eth$nic mlx5_$nic
done
wait_for 30 rdma system set netns exclusive
declare -A pci
for nic in 0 1 2 3; do
	pci[mlx5_$nic]=$(basename "$(readlink -f /sys/class/infiniband/mlx5_$nic/device)")
done
rdma link delete other
ip link delete other

cat >/tmp/config.yaml <<-'CONFIG'
	version: 1
	rescanInterval: 20s
	pools:
	- resource: rdma/nic
	  mode: exclusive
	  binding: late
	  environment: true
	  select: {rdmaDevices: ["mlx5_*"]}
CONFIG
start_containerd /lab/containerd
install_cni $networks
start_kubelet
start_daemon /tmp/config.yaml
daemon=$!
gpu-plugin-standin >"$LAB_OUT/gpu-plugin.log" 2>&1 &
check "the kubelet learns of four slots" kubelet-standin node --patience 90 --wait rdma/nic=4
check "and of two GPUs" kubelet-standin node --patience 60 --wait amd.com/gpu=2
# As host_state, but for the links' indexes and with it their order: a NIC gets another index when the
# pod's namespace has one of that number (net/core/dev.c, __dev_change_net_namespace).
state_without_indexes() { host_state | sed -E 's/^[0-9]+: //' | sort; }
before=$(state_without_indexes)

nodes_of() { in_pod "$1" sh -c 'cd /dev/infiniband && echo *'; }
# What a pod with these HCAs must have: the kernel shows the numbers to every namespace.
nodes_wanted() {
	local verbs node
	node=$(for verbs in /sys/class/infiniband_verbs/uverbs*; do
		case " $* " in *" $(<"$verbs/ibdev") "*) basename "$verbs" ;; esac
	done | sort | paste -sd' ')
	echo "rdma_cm $node"
}
# The device numbers of a pod's nodes are those of the kernel, not the name alone.
numbers_of() { in_pod "$1" sh -c 'cd /dev/infiniband && stat -c "%n %t:%T" uverbs*'; }
numbers_wanted() {
	local node major minor
	for node in ${1#rdma_cm }; do
		IFS=: read -r major minor <"/sys/class/infiniband_verbs/$node/dev"
		printf '%s %x:%x\n' "$node" "$major" "$minor"
	done
}
switch_of() { readlink -f "/sys/bus/pci/devices/$1/../../"; }
# is_beside_gpu POD: whether the pod's NIC is on the switch of its GPU.
is_beside_gpu() {
	local gpu hca
	gpu=$(units_of "$1" amd.com/gpu)
	hca=$(hcas_of "$1")
	[ "$(switch_of "$gpu")" = "$(switch_of "${pci[$hca]}")" ]
}
cdi_files() { find $cdi -name 'rdma-device-plugin-slot_*' | wc -l; }
has_given_all_back() { as_before "$1" "$before" state_without_indexes && equal "$1: no CDI file is left" 0 "$(cdi_files)"; }
pid_is_gone() { ! kill -0 "$1" 2>/dev/null; }
kill_daemon() {
	kill -9 $daemon
	wait_for 20 pid_is_gone $daemon
}
restart_daemon() {
	rdma-device-plugin run --config-file /tmp/config.yaml >>"$LAB_OUT/rdma-device-plugin.log" 2>&1 &
	daemon=$!
	wait_for 60 test -S $socket
}

step "NICs by GPU"
check "a pod with a GPU and a slot runs" pod_of_nics a 1 1
check "its NIC is on the switch of its GPU" is_beside_gpu a
contains "its unit is a slot, which names no HCA" '^slot_' "$(units_of a rdma/nic)"
hca_a=$(hcas_of a)
nodes_a=$(nodes_wanted "$hca_a")
equal "it has the node of that HCA alone" "$nodes_a" "$(nodes_of a)"
equal "and it is that device" "$(numbers_wanted "$nodes_a")" "$(numbers_of a)"
equal "the move gave it a number that it did not have" "rdma_cm uverbs0" "$nodes_a"
contains "its HCA works" PORT_ACTIVE "$(in_pod a ibv_devinfo -d "$hca_a")"
equal "the environment names it for NCCL" "=$hca_a:1" "$(in_pod a sh -c 'echo "$NCCL_IB_HCA"')"
check "a pod with the other GPU runs" pod_of_nics b 1 1
check "its NIC is on the switch of that" is_beside_gpu b
equal "it has the node of its own alone" "$(nodes_wanted "$(hcas_of b)")" "$(nodes_of b)"
check "a pod with the two other NICs runs" pod_of_nics c 2 0
equal "it has both" 2 "$(hcas_of c | wc -w)"
# shellcheck disable=SC2046 # two names
equal "and their nodes" "$(nodes_wanted $(hcas_of c))" "$(nodes_of c)"
equal "no NIC is two pods'" 4 "$(for one in a b c; do hcas_of $one; done | tr ' ' '\n' | sort -u | wc -l)"
refuses "a fourth pod waits" "insufficient rdma/nic" pod_of_nics d 1 0
equal "four CDI files, one for each slot" 4 "$(cdi_files)"
check "pods: HCAs, GPUs, ages and stages" rdmactl pods -o wide
show cat <<<"$checked"
for pod in a b; do
	contains "pod $pod: the columns HCA, GPUS, INTERFACE, AGE and STAGE" \
		"^default/$pod +main +rdma/nic +${pci[$(hcas_of $pod)]} +$(units_of $pod amd.com/gpu) PIX +net1 +move .* [0-9]+[sm] +$(units_of $pod rdma/nic) +attached " "$checked"
done
check "all three end" kubelet-standin delete-pod a b c
has_given_all_back "after three pods"

step "daemon killed and started between ADD and DEL"
kubelet-standin node --patience 60 --wait rdma/nic=4
check "a pod runs" pod_of_nics a 1 1
hca_a=$(hcas_of a)
nodes_a=$(nodes_of a)
kill_daemon
check "without its daemon no container of it starts" eval \
	'! kubelet-standin restart-container a main'
restart_daemon
kubelet-standin node --patience 60 --wait rdma/nic=4
check "with the next daemon it does" kubelet-standin restart-container a main
equal "it has the same HCA" "$hca_a" "$(hcas_of a)"
equal "and the same nodes" "$nodes_a" "$(nodes_of a)"

step "no CDI file, no container"
kill_daemon
file=$(echo $cdi/rdma-device-plugin-slot_*)
# Within the directory: containerd sees no file that is moved into it from another one
# (container-device-interface, pkg/cdi/cache.go: it waits for no IN_MOVED_TO).
mv "$file" "$file.away"
# A kubelet that has just started asks no plugin before one has registered.
kubelet-standin restart-kubelet
refuses "the runtime creates no container" 'unresolvable CDI devices' kubelet-standin restart-container a main
tell "    $(grep -o 'rpc error.*\|CreateContainer.*' <<<"$(kubelet-standin restart-container a main 2>&1 || true)" | tail -n 1)"
mv "$file.away" "$file"
check "with the file it does" kubelet-standin restart-container a main
equal "with the nodes of its HCA" "$nodes_a" "$(nodes_of a)"

step "DEL without a daemon"
check "the pod ends" kubelet-standin delete-pod a
has_given_all_back "after a DEL without a daemon"
restart_daemon
gpu-plugin-standin >>"$LAB_OUT/gpu-plugin.log" 2>&1 &
check "the next daemon offers all slots" kubelet-standin node --patience 60 --wait rdma/nic=4
check "and of GPUs" kubelet-standin node --patience 60 --wait amd.com/gpu=2
check "a pod gets all four" pod_of_nics e 4 0
equal "it has them" 4 "$(hcas_of e | wc -w)"
check "it ends" kubelet-standin delete-pod e
has_given_all_back "after a pod with all NICs"

step "ADD without a daemon, which comes back"
kubelet-standin node --patience 60 --wait rdma/nic=4
# The kubelet admits a pod only while the daemon lives, so the first attempts fail for want of the
# network's definition.
mv $networks/nads.yaml /tmp/
pod_of_nics f 1 1 --retry-seconds 240 >/tmp/f.log 2>&1 &
running=$!
is_admitted() { units_of f rdma/nic | grep -q slot_; }
check "a pod is admitted" wait_for 60 is_admitted
kill_daemon
mv /tmp/nads.yaml $networks/
failed() { grep -q 'node.sock' "$LAB_OUT/containerd.log"; }
check "the runtime is told that the daemon does not answer" wait_for 90 failed
netns=away
ip netns add $netns
slot=$(units_of f rdma/nic)
refuses "the plugin's error has code 11: try again later" '"code": ?11' \
	env CNI_COMMAND=ADD CNI_CONTAINERID=x CNI_NETNS=/run/netns/$netns CNI_IFNAME=net1 CNI_PATH=/opt/cni/bin \
	CNI_ARGS="K8S_POD_NAMESPACE=default;K8S_POD_NAME=f" sh -c \
	"echo '{\"cniVersion\": \"1.0.0\", \"name\": \"rdma-move\", \"type\": \"rdma-netdev\", \"attach\": \"move\", \"deviceID\": \"$slot\"}' | rdma-netdev"
ip netns delete $netns
equal "nothing of the failures is left" 0 "$(cdi_files)"
restart_daemon
if wait $running; then
	pass "the runtime's next attempt succeeds"
else
	fail "the runtime's next attempt succeeds" "$(</tmp/f.log)"
fi
check "the pod has the NIC beside its GPU" is_beside_gpu f
equal "and its node alone" "$(nodes_wanted "$(hcas_of f)")" "$(nodes_of f)"
check "it ends" kubelet-standin delete-pod f
has_given_all_back "at the end"

step "pods without a network follow each other on the same HCAs"
kill_daemon
sed -i 's/binding: late/&\n  bindAtStart: true/' /tmp/config.yaml
restart_daemon
check "the next daemon offers all slots" kubelet-standin node --patience 60 --wait rdma/nic=4
# containers POD: how often one was made for it.
containers() { ctr --namespace k8s.io containers list --quiet "labels.\"io.kubernetes.pod.name\"~=^$1(-|\$),labels.\"io.cri-containerd.kind\"==container" | wc -l; }
for pod in g h i; do
	check "$pod runs" worker $pod "" "rdma/nic: 4"
	equal "$pod: its container started at the first try" 1 "$(containers $pod)"
	contains "$pod: its bindings have its cgroup, found by its UID" '^kubepods(/besteffort)?/pod[0-9a-f-]{32,}$' \
		"$(jq -r '.cgroup // "none"' /run/rdma-netdev/bindings/* | sort -u)"
	equal "$pod has the nodes of all four HCAs" "$(nodes_wanted mlx5_0 mlx5_1 mlx5_2 mlx5_3)" "$(nodes_of $pod)"
	check "$pod ends" kubelet-standin delete-pod $pod
done
# No next pod asks for them: the daemon's next round finds that the pod is over.
are_unbound() { [ "$(cdi_files)" = 0 ]; }
check "without a next pod the bindings end as well" wait_for 60 are_unbound
has_given_all_back "after pods without a network"
