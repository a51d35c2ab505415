# The DaemonSet as it is shipped: its image, init container, mounts, and the one capability it has
# lab: memory=1536 timeout=600 images=pods,node
# lab: binaries=rdma-device-plugin,rdma-netdev,rdma-ipam,rdmactl standins=kubelet-standin,multus-standin
# shellcheck shell=bash disable=SC2154

resource=rdma/hca_shared_devices_a
perftest=/lab/manifests/examples/perftest
daemonset=/tmp/daemonset.yaml

ip link set eth0 name ens2f0
make_hca_down ens2f0 mlx5_0
# As systemd leaves it, and Kubernetes expects it.
mount --make-rshared /
start_containerd
offer_networks $perftest
start_kubelet

check "the image comes in under a full name" ctr --namespace k8s.io image import /lab/node.tar
image=$(ctr --namespace k8s.io image list --quiet | grep '^localhost/rdma-netdev:')
contains "its name has the version" ':[0-9]+\.[0-9]+\.[0-9]+$' "$image"

# The init container of docs/install.md, for the one HCA of this node.
cat >/tmp/waits.yaml <<-POD
	apiVersion: v1
	kind: Pod
	metadata: {name: waits}
	spec:
	  terminationGracePeriodSeconds: 1
	  initContainers:
	  - name: wait-for-rdma
	    image: $image
	    command: [rdmactl]
	    args: [preflight, --wait, "120", --strict, --expect, "1", --only, "M01,M02,H,L01"]
	    env: [{name: RDMA_HOST_ROOT, value: /host}]
	    volumeMounts: [{name: sys, mountPath: /host/sys, readOnly: true}]
	  containers:
	  - name: main
	    image: localhost/rdma-tools:1
	    imagePullPolicy: IfNotPresent
	    command: [sleep, infinity]
	  volumes:
	  - {name: sys, hostPath: {path: /sys, type: Directory}}
POD
kubelet-standin run-pod /tmp/waits.yaml >/tmp/waits.log 2>&1 &
runs=$!
is_waiting() { pgrep -f '^rdmactl preflight --wait'; }
check "a pod's init container waits while the port is down" wait_for 60 is_waiting
nap 5
check "for as long as it is" is_waiting
ip link set ens2f0 up
active ens2f0 mlx5_0
if wait $runs; then pass "with an active port the pod runs"; else fail "with an active port the pod runs" "$(</tmp/waits.log)"; fi
check "it ends" kubelet-standin delete-pod waits

daemonset $perftest/pools.json >$daemonset
before=$(host_state)
check "its pod runs" kubelet-standin run-pod $daemonset
in_daemon() { kubelet-standin exec kube-system/rdma-netdev -- "$@"; }
for program in rdma-netdev rdma-ipam; do
	check "the init container installed $program" cmp "/opt/cni/bin/$program" "/lab/bin/$program"
done
contains "the installed policy names the node" "\"node\": \"$(uname -n)\"" "$(</etc/rdma-netdev/policy.json)"
check "the kubelet learns of the HCA" kubelet-standin node --wait $resource=63

daemon=$(pgrep -f '^/usr/local/bin/rdma-device-plugin run')
# CAP_NET_ADMIN is bit 12.
equal "the daemon has one capability" 0000000000001000 "$(awk '/^CapEff/ { print $2 }' "/proc/$daemon/status")"
refuses "and no shell" "not found|no such file" in_daemon sh -c true
check "discover in the container sees the HCA" in_daemon rdmactl discover
contains "with its netdev and its resource" "mlx5_0 .*ens2f0.*$resource" "$checked"

check "preflight on the node: nothing fails" rdmactl preflight --config-file $perftest/pools.json --all
check "preflight in the container: nothing fails" in_daemon rdmactl preflight --all
contains "it knows the ports" '^L01 +pass' "$checked"
check "both test pods run" kubelet-standin run-pod $perftest/pod-1.yaml $perftest/pod-2.yaml
check "the container sees the node's leases" in_daemon rdmactl addresses --json
contains "both of them" 'rdma-test-pod-1(.|\n)*rdma-test-pod-2' "$(tr '\n' ' ' <<<"$checked")"

check "status in the container" in_daemon rdmactl status
contains "the units, and the range of the addresses" \
	' shared .* 63 .*192\.168\.111\.0/24' "$(tr '\n' ' ' <<<"$checked")"
check "pods in the container knows everybody" in_daemon rdmactl pods
contains "with their addresses" \
	'rdma-test-pod-1 .*192\.168\.111\..*rdma-test-pod-2 .*192\.168\.111\.' "$(tr '\n' ' ' <<<"$checked")"
# Here /var/run, where the runtime makes them, is not a link to the /run/netns that the container has.
equal "the container sees that the namespaces of both pods are alive" "alive alive" \
	"$(in_daemon rdmactl pods --json | jq -r '[.pods[].netnsState | select(.)] | join(" ")')"
check "the DaemonSet is rolled while the pods run" kubelet-standin delete-pod kube-system/rdma-netdev
check "its next pod runs" kubelet-standin run-pod $daemonset
check "and registers again" kubelet-standin node --wait $resource=63
check "the pods talk as before" kubelet-standin exec rdma-test-pod-1 -- ping -c 2 -W 5 192.168.111.2
check "the pods end" kubelet-standin delete-pod rdma-test-pod-1 rdma-test-pod-2
as_before "the host is as before" "$before"
