# An MPI job of two workers with two NICs each: mpirun over ssh, UCX over both; then verify between the workers
# lab: guests=2 nics=3 memory=1536 timeout=900 images=mpi
# lab: binaries=rdma-device-plugin,rdma-netdev,rdma-ipam,rdmactl standins=kubelet-standin,multus-standin
# shellcheck shell=bash disable=SC2016,SC2154

# The MPIJob of this example. The scenario does the MPI operator's part: pods, keys, host file.
example=/lab/manifests/examples/mpijob-cpu/kustomization.yaml
of_example() { sed -nE "s/^ *$1: (.*)\$/\1/p" $example; }
other=$((3 - LAB_GUEST)) worker=worker-$LAB_GUEST job=/run/mpi-job

# eth0 is the node's NIC and carries the pods' default network from node to node.
ip link set eth0 up
ip addr add "192.168.10.$LAB_GUEST/24" dev eth0
ip route add "10.244.$other.0/24" via "192.168.10.$other"
for nic in 0 1; do
	ip link set "eth$((nic + 1))" name "rdma$nic"
	make_hca "rdma$nic" "mlx5_$nic"
done
# The nodes do not share a store: each uses its own part of the example's range.
mkdir -p /tmp/networks $job/{ssh,mpi}
sed 's|"range": .*|&, "range_start": "192.168.114.'"${LAB_GUEST}0"'", "range_end": "192.168.114.'"${LAB_GUEST}9"'"|' \
	/lab/manifests/examples/mpijob/nad.yaml >/tmp/networks/nad.yaml
start_containerd
install_cni /tmp/networks
sed -i 's|"subnet": "10.244.0|"routes": [{"dst": "10.244.0.0/16"}], "subnet": "10.244.'"$LAB_GUEST|" /etc/cni/cluster.conflist
start_kubelet
start_profile exclusive
check "the kubelet learns of both NICs" kubelet-standin node --patience 90 --wait rdma/nic=2
before=$(host_state)

# mpi_pod NAME COMMAND [NETWORKS LIMITS]: runs a pod of the job. Keys, host file and /etc/hosts are mounted.
mpi_pod() {
	local networks=${3:+"k8s.v1.cni.cncf.io/networks: \"$3\""} limits=${4:-"{}"}
	cat >"/tmp/$1.yaml" <<-POD
		apiVersion: v1
		kind: Pod
		metadata:
		  name: $1
		  annotations: {$networks}
		spec:
		  restartPolicy: Never
		  containers:
		  - name: main
		    image: localhost/mpi:1
		    imagePullPolicy: IfNotPresent
		    command: [sh, -c, "$2"]
		    env:
		    - {name: OMPI_MCA_orte_default_hostfile, value: /etc/mpi/hostfile}
		    - {name: OMPI_MCA_plm_rsh_args, value: -o ConnectionAttempts=10}
		    securityContext: {capabilities: {add: [IPC_LOCK]}}
		    resources: {limits: $limits}
		    volumeMounts:
		    - {name: ssh, mountPath: /root/.ssh}
		    - {name: mpi, mountPath: /etc/mpi}
		    - {name: hosts, mountPath: /etc/hosts}
		  volumes:
		  - {name: ssh, hostPath: {path: $job/ssh}}
		  - {name: mpi, hostPath: {path: $job/mpi}}
		  - {name: hosts, hostPath: {path: $job/hosts}}
	POD
	kubelet-standin run-pod "/tmp/$1.yaml"
}
cp /etc/hosts $job/hosts

pods=("$worker")
check "a worker runs" mpi_pod $worker \
	"ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key && exec /usr/sbin/sshd -De" \
	rdma-worker "$(of_example limits)"
equal "it has two HCAs" 2 "$(in_pod $worker ibv_devinfo | grep -c hca_id)"
for net in net1-0 net1-1; do
	contains "its $net has an address of the range" '^192\.168\.114\.' "$(address_of $worker $net)"
done
address=$(address_of $worker eth0)
echo "${address%/*} $worker" >"/lab/sync/host-$LAB_GUEST"
if [ "$LAB_GUEST" = 1 ]; then
	pods+=(launcher)
	check "the launcher runs" mpi_pod launcher "exec sleep infinity"
	address=$(address_of launcher eth0)
	echo "${address%/*} launcher" >>$job/hosts
	in_pod launcher ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/id_ed25519
	cp $job/ssh/id_ed25519.pub /lab/sync/key
fi
meet running
cp /lab/sync/key $job/ssh/authorized_keys
cat /lab/sync/host-* >>$job/hosts
printf '%s slots=1\n' worker-1 worker-2 >$job/mpi/hostfile

# received: packets that each HCA received, then bytes that the pod received by eth0 and by each NIC.
received() {
	cat /sys/class/infiniband/mlx5_{0,1}/ports/1/hw_counters/rcvd_pkts
	in_pod $worker cat /sys/class/net/{eth0,net1-0,net1-1}/statistics/rx_bytes
}
mapfile -t at_first < <(received)
meet counted

if [ "$LAB_GUEST" = 1 ]; then
	# The example's arguments, with smaller messages for an emulated machine. UCX splits a message of
	# UCX_RNDV_THRESH bytes or more between both NICs. UCX 1.13 checks the GID of each datagram. It reads the
	# type of the IP header from the completion's service level, which ConnectX sets and soft RoCE does not.
	# With that check, UCX drops all datagrams of soft RoCE and its connections time out.
	mapfile -t arguments < <(sed -n '/^ *- mpirun$/,/- op:/{/- mpirun/d; /- op:/d; s/^ *- //; s/"//g; p}' $example)
	command=(mpirun -x UCX_UD_VERBS_ETH_DGID_CHECK=n -x UCX_RNDV_THRESH=16384 "${arguments[@]/8388608/262144}" -n 3 -p 0)
	check "mpirun runs NetPIPE on both workers" kubelet-standin exec --seconds 330 launcher -- "${command[@]}"
	table=$LAB_OUT/table
	echo "$checked" >"$table"
	# One trial of each size; NetPIPE makes several.
	awk '/ Mbps in / { bytes += $2 * $4 } END { print bytes + 0 }' "$table" >/lab/sync/bytes
	contains "its table has the largest size" ' 262144 bytes +3 times --> +[0-9.]+ Mbps in ' "$(<"$table")"
fi
meet measured

mapfile -t at_last < <(received)
bytes=$(</lab/sync/bytes)
gained() { echo $((at_last[$1] - at_first[$1])); }
echo "the table's messages: $bytes bytes; gained: $(for i in 0 1 2 3 4; do gained $i; done | paste -sd' ')"
# A packet of RoCE holds up to 1024 bytes at an MTU of 1500.
packets=$(($(gained 0) + $(gained 1))) octets=$(($(gained 3) + $(gained 4)))
check "the worker received the table's messages by its HCAs" test $((packets * 1024)) -gt "$bytes"
check "and by its NICs" test $octets -gt "$bytes"
for nic in 0 1; do
	check "mlx5_$nic received a third or more" test $((3 * $(gained $nic))) -gt $packets
	check "net1-$nic received a third or more" test $((3 * $(gained $((nic + 3))))) -gt $octets
done
check "eth0 received less than a tenth" test "$(gained 2)" -lt $((bytes / 10))

if [ "$LAB_GUEST" = 1 ]; then
	# "kubectl exec POD -- COMMAND": one worker runs on another guest, and the launcher reaches both by ssh.
	cat >/tmp/kubectl <<-'SH'
		#!/bin/bash
		pod=$2 quote="'" escaped="'\\''"
		shift 3
		exec kubelet-standin exec launcher -- ssh -o BatchMode=yes "$pod" -- "$(printf "'%s' " "${@//$quote/$escaped}")"
	SH
	chmod +x /tmp/kubectl
	check "verify: RDMA works between the workers" \
		rdmactl verify --kubectl /tmp/kubectl --timeout 120 --only ping,rping pod:worker-1 pod:worker-2
	contains "by both pairs of NICs" 'rping +pass' "$checked"
fi
meet verified

check "the pods end" kubelet-standin delete-pod "${pods[@]}"
meet ended
for nic in 0 1; do wait_for 20 settled rdma$nic; done
as_before "links, addresses, routes and GIDs are as before" "$before"
equal "no lease is left" "[]" "$(rdmactl addresses --json | jq -c .leases)"
