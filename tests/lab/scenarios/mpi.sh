# An MPI job of two workers with two NICs each, over the pods' interfaces; its table judged by verify
# lab: guests=2 nics=3 memory=2560 timeout=1200 images=pods,mpi
# lab: binaries=rdma-device-plugin,rdma-netdev,rdma-ipam,rdmactl standins=kubelet-standin,multus-standin
# shellcheck shell=bash disable=SC2016,SC2154

pod=worker-$LAB_GUEST
# eth0 is the node's own and carries the store; as overlay exclusive has it, the others are for pods.
ip addr add "192.168.10.$LAB_GUEST/24" dev eth0
for nic in 0 1; do
	ip link set "eth$((nic + 1))" name "rdma$nic"
	make_hca "rdma$nic" "mlx5_$nic"
	wait_for 20 settled "rdma$nic"
done
[ "$LAB_GUEST" = 2 ] || serve_store /srv/store 192.168.10.0/24
meet served
umount /var/lib/rdma-ipam
mount_store 4.2 soft 192.168.10.1 /srv/store /var/lib/rdma-ipam
start_containerd
check "the image of the example comes in" ctr --namespace k8s.io image import /lab/mpi.tar
install_cni /lab/manifests/examples/mpijob
start_kubelet
start_daemon /lab/manifests/overlays/exclusive/config.yaml
check "the kubelet learns of both NICs" kubelet-standin node --patience 90 --wait rdma/nic=2
before=$(host_state)
# As the operator makes it of manifests/examples/mpijob-cpu.
cat >/tmp/worker.yaml <<-POD
	apiVersion: v1
	kind: Pod
	metadata:
	  name: $pod
	  annotations: {k8s.v1.cni.cncf.io/networks: "rdma-worker, rdma-worker"}
	spec:
	  restartPolicy: Never
	  containers:
	  - name: worker
	    image: localhost/mpi:1
	    imagePullPolicy: IfNotPresent
	    command: [/usr/sbin/sshd, -De]
	    securityContext: {capabilities: {add: [IPC_LOCK]}}
	    resources: {limits: {rdma/nic: 2}}
POD
check "the worker runs" kubelet-standin run-pod /tmp/worker.yaml
address=$(address_of "$pod" net1)
echo "${address%/*}" >"$LAB_OUT/address"
equal "it has two HCAs" 2 "$(in_pod "$pod" ibv_devices | grep -c mlx5_)"
# The operator gives all pods of a job one key.
if [ "$LAB_GUEST" = 1 ]; then
	in_pod "$pod" sh -c 'mkdir -p -m 700 /root/.ssh && ssh-keygen -q -t ed25519 -N "" -f /root/.ssh/id_ed25519'
	in_pod "$pod" cat /root/.ssh/id_ed25519.pub >"$LAB_OUT/key"
fi
meet keys
in_pod "$pod" sh -c "mkdir -p -m 700 /root/.ssh && echo '$(cat /lab/out/1/key)' >>/root/.ssh/authorized_keys"
meet running

if [ "$LAB_GUEST" = 1 ]; then
	hosts=$(cat /lab/out/1/address),$(cat /lab/out/2/address)
	sent() { cat /sys/class/infiniband/mlx5_?/hw_counters/sent_pkts | paste -sd+ | bc; }
	in_pod "$pod" mpirun --allow-run-as-root -np 2 --host "$hosts" --mca oob_tcp_if_include net1 \
		--mca pml ucx --mca btl ^openib -x UCX_TLS=rc,ud,self -x UCX_LOG_LEVEL=info NPopenmpi -u 1048576 -n 5 \
		>"$LAB_OUT/table" 2>&1 || { fail "mpirun runs the job"; lab_diag <"$LAB_OUT/table"; }
	lab_diag <"$LAB_OUT/table"
fi
meet measured
check "the worker ends" kubelet-standin delete-pod "$pod"
for nic in 0 1; do wait_for 20 settled "rdma$nic"; done
as_before "the host is as before" "$before"
