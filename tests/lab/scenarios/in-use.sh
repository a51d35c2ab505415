# A process of an ended pod hangs in the kernel with its HCA: no pod gets the HCA until the process has ended
# lab: nics=3 memory=1536 timeout=900 images=pods,node
# lab: binaries=rdma-device-plugin,rdma-netdev,rdma-ipam,rdmactl standins=kubelet-standin,multus-standin
# shellcheck shell=bash disable=SC2016,SC2154

resource=rdma/hca
for nic in 0 1 2; do
	make_hca eth$nic mlx5_$nic
done
mount --make-rshared /
start_containerd
offer_networks
start_kubelet
check "the image comes in" ctr --namespace k8s.io image import /lab/node.tar

# The daemon in its container, which has the PID namespace of the host; two of the HCAs are exclusive.
cat >/tmp/pools.json <<-POOLS
	{"version": 1, "pools": [
	  {"resource": "$resource", "mode": "exclusive", "select": {"rdmaDevices": ["mlx5_1", "mlx5_2"]}}]}
POOLS
daemonset /tmp/pools.json >/tmp/daemonset.yaml
check "the DaemonSet's pod runs" kubelet-standin run-pod /tmp/daemonset.yaml
check "the kubelet learns of two HCAs" kubelet-standin node --patience 60 --wait $resource=2
in_daemon() { kubelet-standin exec kube-system/rdma-netdev -- "$@"; }
# unhealthy: the HCAs that the kubelet may not allocate, each with its reasons.
unhealthy() {
	in_daemon rdmactl status --json |
		jq -c '.daemon.pools[].hcas[] | select(.reasons != []) | [.rdmaDevices[0], (.reasons | tostring)]'
}
metrics() { (exec 3<>/dev/tcp/127.0.0.1/9834 && printf 'GET /metrics HTTP/1.0\r\n\r\n' >&3 && cat <&3); }
# processes_with HCA: those that have a verbs context of it.
processes_with() { rdma resource show ctx dev "$1" | sed -n 's/.* pid \([0-9]*\) .*/\1/p'; }
one_has() { [ "$(processes_with "$1" | wc -l)" = 1 ]; }
# pod NAME COUNT: each of its HCAs has a process that waits for a peer.
pod() {
	cat >"/tmp/$1.yaml" <<-POD
		apiVersion: v1
		kind: Pod
		metadata: {name: $1}
		spec:
		  restartPolicy: Never
		  containers:
		  - name: main
		    image: localhost/rdma-tools:1
		    imagePullPolicy: IfNotPresent
		    command:
		    - sh
		    - -c
		    - |
		      for node in /dev/infiniband/uverbs*; do
		        ibv_rc_pingpong -d "\$(cat /sys/class/infiniband_verbs/\${node##*/}/ibdev)" &
		      done
		      wait
		    securityContext: {capabilities: {add: [IPC_LOCK]}}
		    resources: {limits: {$resource: $2}}
	POD
	kubelet-standin run-pod "/tmp/$1.yaml"
}
hca_of() {
	local node
	node=$(in_pod "$1" sh -c 'ls /dev/infiniband' | grep uverbs)
	cat "/sys/class/infiniband_verbs/$node/ibdev"
}

step "a service of the host has a context of each HCA"
for hca in mlx5_1 mlx5_2; do
	ibv_rc_pingpong -d $hca -p $((19000 + ${hca#mlx5_})) >"$LAB_OUT/host-$hca.log" 2>&1 &
	check "it has one of $hca" wait_for 20 one_has $hca
done

step "a process of a pod hangs, and the kubelet forgets the pod"
check "a pod with an HCA runs" pod a 1
hca=$(hca_of a)
other=mlx5_$((3 - ${hca#mlx5_}))
two_have() { [ "$(processes_with "$1" | wc -l)" = 2 ]; }
check "its process has a context of it" wait_for 20 two_have "$hca"
process=$(processes_with "$hca" | tail -n 1)
show rdma resource show ctx
uid=$(sed -n 's,.*/pod\([0-9a-f-]*\).*,\1,p' /proc/"$process"/cgroup)
# A process that the freezer of version 1 stops is ended by no signal before it is thawed, as one that
# waits in the kernel.
freezer=/run/freezer
mkdir -p $freezer
mount -t cgroup -o freezer freezer $freezer
mkdir $freezer/hung
echo "$process" >$freezer/hung/cgroup.procs
echo FROZEN >$freezer/hung/freezer.state
is_frozen() { grep -q FROZEN $freezer/hung/freezer.state; }
check "the process hangs" wait_for 20 is_frozen
equal "while the pod has the HCA it is healthy, and so is that of the host's service" "" "$(unhealthy)"
check "the kubelet forgets the pod" kubelet-standin delete-pod --force a
# The kubelet may allocate the HCA before it learns that it must not; then its container does not start.
refuses "at once, a pod that asks for both does not start" "insufficient $resource|cannot be used: process $process " pod early 2
kill -9 "$(awk '/^PPid/ { print $2 }' "/proc/$process/status")" "$process"
nap 1
check "a signal does not end the process" test -e "/proc/$process"
check "the kubelet learns that it may not allocate the HCA" kubelet-standin node --patience 30 --wait $resource=1
show unhealthy
contains "the reason names the HCA, the process and its pod" \
	"^\[\"$hca\",\".*process $process \(.*ibv_rc_pingpong.*the pod with UID $uid " "$(unhealthy)"
contains "the metric names the reason" "hca_unhealthy\{.*rdma_device=\"$hca\",reason=\"in_use\"\} 1" "$(metrics | grep hca_unhealthy)"
check "the next pod has the other HCA" pod b 1
equal "which a service of the host uses" "$other" "$(hca_of b)"
refuses "the HCA of the hung process is given to nobody" "insufficient $resource" pod c 1
check "the pod ends" kubelet-standin delete-pod b

step "the process ends"
echo THAWED >$freezer/hung/freezer.state
thawed=$SECONDS
pid_is_gone() { [ ! -e "/proc/$process" ]; }
check "it is gone" wait_for 20 pid_is_gone
check "the kubelet learns of two HCAs" kubelet-standin node --patience 60 --wait $resource=2
tell "    $((SECONDS - thawed)) s after the process ended"
equal "none is unhealthy" "" "$(unhealthy)"
check "a pod gets both" pod d 2
