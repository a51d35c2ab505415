# A real cluster of two nodes that share a directory on NFS: unique addresses, a drained node, uninstall
# lab: guests=2 nics=2 memory=3072 cpus=2 timeout=3600 images=pods,node kubernetes=yes
# lab: binaries=rdma-device-plugin,rdma-netdev,rdma-ipam,rdma-agent,rdmactl
# shellcheck shell=bash disable=SC2016,SC2154

# shellcheck source=tests/lab/guest/cluster.sh
. /lab/guest/cluster.sh
manifests=/lab/manifests
chart=$manifests/chart
resource=rdma/hca_shared_devices_a
subnet=192.168.111.0/24
directory=/mnt/rdma

# eth0 is the node's own, ens2f0 the HCA to share.
node_address "172.20.0.$LAB_GUEST"
ip link set eth1 name ens2f0
ip link set ens2f0 mtu 4200
make_hca ens2f0 mlx5_0
mount --make-rshared /
start_containerd
ctr --namespace k8s.io image import /lab/node.tar
meet booted
[ "$LAB_GUEST" = 2 ] || serve_store /srv/store 172.20.0.0/24
join_cluster "172.20.0.$LAB_GUEST"
meet_late joined
before=$(host_state)
# The second node mounts it when the agent already runs there.
mkdir -p $directory
[ "$LAB_GUEST" = 2 ] || mount_store 4.2 soft 172.20.0.1 /srv/store $directory
meet_late served

rolled() { own rollout status ds/rdma-netdev --timeout=600s; }
# An agent of any node.
in_agent() { own exec ds/rdma-netdev -c rdma-agent -- "$@"; }
agents() { own get pods -l app.kubernetes.io/name=rdma-netdev -o json |
	jq -r '[.items[].status.containerStatuses // [] | .[] | select(.name == "rdma-agent" and .state.running)] | length'; }
agents_run() { [ "$(agents)" = 2 ]; }
offers_of() { kubectl get nodes -o json | jq -r --arg resource $resource '[.items[].status.allocatable[$resource]] | join(" ")'; }
both_offer() { [ "$(offers_of)" = "63 63" ]; }
# pod NUMBER NODE: one of the example, on that node.
pod() { sed -e "s/rdma-test-pod-1/pod-$1/" -e "s/^spec:/&\n  nodeName: $2\n  terminationGracePeriodSeconds: 1/" $manifests/examples/perftest/pod-1.yaml; }
pods_of() { kubectl get pods -o json | jq -r --arg node "$1" '.items[] | select(.spec.nodeName == $node).metadata.name'; }
addresses_of() { local name; for name in $(pods_of "$1"); do address_of "$name"; done; }
# nodes_of ADDRESS…: whose parts they are in, each node once.
nodes_of() { owner_of $directory $subnet "$@" | sort -u; }

if [ "$LAB_GUEST" = 1 ]; then
	step "helm install -f values/nfs-store.yaml"
	check "the API server takes the chart" helm install rdma-netdev $chart --namespace kube-system -f $chart/values/nfs-store.yaml
	check "an agent runs on each node" wait_for 300 agents_run
	equal "without a right in the API" no "$(kubectl auth can-i get nodes --as=system:serviceaccount:kube-system:rdma-netdev || true)"
fi
meet_late installed
[ "$LAB_GUEST" = 1 ] || mount_store 4.2 soft 172.20.0.1 /srv/store $directory
meet_late mounted
if [ "$LAB_GUEST" = 1 ]; then
	check "rdmactl addresses init in the agent's container" in_agent rdmactl addresses init
	show cat <<<"$checked"
	check "the DaemonSet is rolled out on both nodes" rolled
	show own get pods -o wide
	check "both nodes offer the HCA's shares" wait_for 200 both_offer

	step "three pods on each node"
	check "the API server takes the network" kubectl apply -f $manifests/examples/perftest/nad.yaml
	for number in 1 2 3; do
		kubectl apply -f <(pod "$number" node1) -f <(pod "$((number + 3))" node2)
	done
	check "all become ready" kubectl wait --for=condition=Ready --timeout=900s pod/pod-{1,2,3,4,5,6}
	mapfile -t first < <(addresses_of node1)
	mapfile -t second < <(addresses_of node2)
	equal "they have six addresses" 6 "$(printf '%s\n' "${first[@]}" "${second[@]}" | sort -u | grep -c '^192\.168\.111\.')"
	equal "the directory says that node1 owns its pods' addresses" node1 "$(nodes_of "${first[@]}")"
	equal "and node2 its own" node2 "$(nodes_of "${second[@]}")"
	check "pods of two nodes reach each other" in_pod pod-1 ping -c 3 -W 5 "${second[0]}"
	ln -s /lab/bin/rdmactl /usr/local/bin/kubectl-rdma
	check "kubectl rdma addresses" kubectl rdma addresses
	show cat <<<"$checked"
	for number in 1 6; do
		node=node$(((number + 2) / 3))
		contains "of pod-$number: its node and its address" "^$node +$(address_of pod-$number)(/24)? .* default/pod-$number +net1" "$checked"
	done
	check "kubectl rdma status: both nodes answer and are in order" kubectl rdma status
	show cat <<<"$checked"
fi
meet_late running
check "fsck on the node finds nothing" rdmactl addresses fsck

if [ "$LAB_GUEST" = 1 ]; then
	step "kubectl drain node2"
	check "node2 is drained" kubectl drain node2 --ignore-daemonsets --force --timeout=300s
	equal "its pods are gone" "" "$(pods_of node2)"
	kubectl apply -f <(pod 7 node1)
	check "another pod on node1 becomes ready" kubectl wait --for=condition=Ready --timeout=600s pod/pod-7
	equal "with an address of node1" node1 "$(nodes_of "$(address_of pod-7)")"
	equal "that no other pod there has" 4 "$(addresses_of node1 | sort -u | wc -l)"
	in_agent2() {
		own exec "$(own get pods -l app.kubernetes.io/name=rdma-netdev --field-selector spec.nodeName=node2 -o name)" -c rdma-agent -- "$@"
	}
	check "node2 gives back what it owns" in_agent2 rdmactl addresses give-back
	show cat <<<"$checked"
	equal "only node1 owns addresses" node1 "$(owners $directory $subnet | awk '{ print $2 }' | sort -u)"
	check "node2 takes pods again" kubectl uncordon node2
	kubectl apply -f <(pod 8 node2)
	check "one becomes ready" kubectl wait --for=condition=Ready --timeout=600s pod/pod-8
	equal "with an address of node2" node2 "$(nodes_of "$(address_of pod-8)")"

	step "helm upgrade --set uninstall.enabled=true, helm uninstall"
	check "the API server takes it" helm upgrade rdma-netdev $chart --namespace kube-system --reuse-values --set uninstall.enabled=true
	waits() { own logs -l app.kubernetes.io/name=rdma-netdev -c uninstall --prefix | grep 'waiting: '; }
	check "the nodes wait while pods have interfaces" wait_for 400 waits
	show waits
	check "the pods end" kubectl delete pods --all --timeout=300s
	check "both nodes become clean" rolled
	show own logs -l app.kubernetes.io/name=rdma-netdev -c uninstall --prefix
	equal "nobody owns an address in the directory" "" "$(owners $directory $subnet)"
	check "the release goes" helm uninstall rdma-netdev --namespace kube-system --wait
	# The agents remove their sockets when they end.
	gone() { [ -z "$(own get pods -l app.kubernetes.io/name=rdma-netdev -o name)" ]; }
	check "and its pods" wait_for 200 gone
fi
meet_late clean
equal "nothing of it is left on the node" "" "$(find /opt/cni/bin -name 'rdma*'
	find /etc/rdma-netdev /var/lib/rdma-netdev /run/rdma-netdev /var/run/cdi -mindepth 1 || true)"
check "the directory can be unmounted" wait_for 60 umount $directory
meet_late unmounted
as_before "the host is as before" "$before"
meet_late over
