# A whole real cluster of two nodes: unique addresses by its API, all nodes' state, upgrade, uninstall
# lab: guests=2 nics=2 memory=3072 cpus=2 timeout=4200 images=pods,node kubernetes=yes
# lab: binaries=rdma-device-plugin,rdma-netdev,rdma-ipam,rdma-agent,rdmactl
# shellcheck shell=bash disable=SC2016,SC2154

# shellcheck source=tests/lab/guest/cluster.sh
. /lab/guest/cluster.sh
manifests=/lab/manifests

# eth0 is the node's own, ens2f0 the HCA to share.
node_address "172.20.0.$LAB_GUEST"
ip link set eth1 name ens2f0
ip link set ens2f0 mtu 4200
make_hca ens2f0 mlx5_0
mount --make-rshared /
start_containerd
ctr --namespace k8s.io image import /lab/node.tar
meet booted
join_cluster "172.20.0.$LAB_GUEST"
meet_late joined
before=$(host_state)
owners() { kubectl get addresssubnets -o json | jq -r '[.items[].spec.parts[].node | select(.)] | unique | join(" ")'; }

if [ "$LAB_GUEST" = 1 ]; then
	step "kubectl apply -k manifests/base"
	check "the API server takes the manifests" kubectl apply -k $manifests/base
	equal "with no word of warning" "" "$(grep -i warning <<<"$checked" || true)"
	check "the API server takes the admission policies" kubectl apply -f $manifests/components/admission/objects.yaml
	check "the DaemonSet is rolled out on both nodes" own rollout status ds/rdma-netdev --timeout=600s
	show own get pods -o wide
	# The scheduler places both pods on one node as long as the other node offers nothing.
	offers_of() { kubectl get nodes -o json | jq -r '[.items[].status.allocatable["rdma/hca_shared_devices_a"]] | join(" ")'; }
	both_offer() { [ "$(offers_of)" = "63 63" ]; }
	check "both nodes offer the HCA's slots" wait_for 200 both_offer
	step "kubectl apply -k manifests/examples/perftest"
	check "the API server takes the example" kubectl apply -k $manifests/examples/perftest
	check "both pods become ready" kubectl wait --for=condition=Ready --timeout=600s pod/rdma-test-pod-1 pod/rdma-test-pod-2
	nodes=$(kubectl get pods -o json | jq -r '[.items[].spec.nodeName] | sort | join(" ")')
	equal "each on a node of its own" "node1 node2" "$nodes"
	addresses=$(for pod in 1 2; do address_of rdma-test-pod-$pod; done)
	equal "their addresses are two" 2 "$(sort -u <<<"$addresses" | grep -c '^192\.168\.111\.')"
	check "they reach each other over the HCAs" in_pod rdma-test-pod-1 ping -c 3 -W 5 "$(tail -n 1 <<<"$addresses")"
	show kubectl get addresssubnets
	equal "each node has a part" "node1 node2" "$(owners)"
	contains "kubectl shows the subnet, its parts, nodes and free addresses" \
		'192\.168\.111\.0/24 +2 +2 +25[0-9]' "$(kubectl get addresssubnets)"

	step "the token of a node's agent"
	agent=$(own get pods -l app.kubernetes.io/name=rdma-netdev --field-selector spec.nodeName=node1 -o name)
	token=$(own create token rdma-netdev --bound-object-kind Pod --bound-object-name "${agent#pod/}")
	as_node1() { kubectl --token "$token" "$@"; }
	document=$(kubectl get addresssubnets -o name)
	part_of() {
		kubectl get addresssubnets -o json |
			jq -r --arg node "$1" '[.items[].spec.parts | to_entries[] | select(.value.node == $node)][0].key'
	}
	check "can write its own RdmaNode" as_node1 patch rdmanode node1 --type=merge --patch '{"status": {"problems": []}}'
	refuses "cannot write another's" "node1 cannot write rdmanodes of node node2" \
		as_node1 patch rdmanode node2 --type=merge --patch '{"status": {"problems": []}}'
	refuses "cannot take another node's part" "Forbidden" \
		as_node1 patch "$document" --type=merge --patch '{"spec": {"parts": {"'"$(part_of node2)"'": {"node": "node1"}}}}'
	refuses "cannot change a Node" "orbidden" as_node1 label node node1 stolen=yes
	equal "each node has its part still" "node1 node2" "$(owners)"

	step "kubectl rdma: one view of all nodes"
	ln -s /lab/bin/rdmactl /usr/local/bin/kubectl-rdma
	held() { kubectl rdma status | grep -Eq "^$1 +rdma/hca_shared_devices_a +shared( +[0-9]+){3} +63 +1$"; }
	for node in $nodes; do
		check "kubectl rdma status: $node has all its slots, one of them held" wait_for 100 held $node
	done
	check "both nodes are in order" kubectl rdma status
	show cat <<<"$checked"
	for command in discover topology; do check "kubectl rdma $command" kubectl rdma $command; show cat <<<"$checked"; done
	check "kubectl rdma pods" kubectl rdma pods
	show cat <<<"$checked"
	for pod in rdma-test-pod-1 rdma-test-pod-2; do
		node=$(kubectl get pod $pod -o json | jq -r .spec.nodeName)
		contains "of $pod: its node, interface and address" "^$node +default/$pod +rdma/hca_shared_devices_a .* net1 +[^ ]+ +$(address_of $pod)" "$checked"
	done
	check "kubectl rdma addresses" kubectl rdma addresses
	show cat <<<"$checked"
	for pod in rdma-test-pod-1 rdma-test-pod-2; do
		node=$(kubectl get pod $pod -o json | jq -r .spec.nodeName)
		contains "of $pod: its node and its address" "^$node +$(address_of $pod)(/24)? .* default/$pod +net1" "$checked"
	done
fi
meet_late running
check "rdmactl shows this node's part" rdmactl addresses
contains "with the lease of its pod" '192\.168\.111\.[0-9]+/(29|3[0-2]) ' "$checked"
check "fsck finds nothing" rdmactl addresses fsck

if [ "$LAB_GUEST" = 1 ]; then
	step "the Node object of node2 is deleted and registered anew while its pod runs"
	uid_of_node2() { kubectl get node node2 -o json | jq -r .metadata.uid; }
	parts_of_node2() {
		kubectl get addresssubnets -o json | jq -c '[.items[].spec.parts | to_entries[] | select(.value.node == "node2")]'
	}
	parts=$(parts_of_node2)
	uid=$(uid_of_node2)
	kubectl get node node2 -o json | jq 'del(.status) | .metadata |= {name, labels, annotations}' >/tmp/node2.json
	check "the Node is deleted" kubectl delete node node2
	check "and registered anew" kubectl create -f /tmp/node2.json
	equal "under another UID" 2 "$(printf '%s\n' "$uid" "$(uid_of_node2)" | sort -u | wc -l)"
	check "it becomes ready" kubectl wait --for=condition=Ready --timeout=300s node/node2
	equal "its parts are the same, unmarked" "$parts" "$(parts_of_node2)"
	equal "the pods have their addresses" "$addresses" "$(for pod in 1 2; do address_of rdma-test-pod-$pod; done)"
fi
meet_late anew
# As the runtime calls it: Multus itself would ask the API for the pod.
install -d /tmp/away
cp /etc/rdma-netdev/policy.json /tmp/away/policy.json
jq '.allow = ((.allow // {}) + {"unallocated": true})' /tmp/away/policy.json >/tmp/away/policy
network='{"cniVersion": "1.0.0", "name": "rdma-net-ipam", "type": "rdma-netdev", "attach": "macvlan",
	"master": "ens2f0", "ipam": {"type": "rdma-ipam", "range": "192.168.111.0/24"}}'
export RDMA_NETDEV_POLICY=/tmp/away/policy
# What the node claims for pods stays its own for ten minutes, when they are gone.
for number in $(seq 10); do
	ip netns add "away$number"
	check "pod $number" cni rdma-netdev ADD "before$number" "away$number" net1 "$network"
done
for number in $(seq 10); do
	check "pod $number ends" cni rdma-netdev DEL "before$number" "away$number" net1 "$network"
done
[ "$LAB_GUEST" = 2 ] || { step "the API server is away" && api_server stop; }
meet_late away
for number in $(seq 10); do
	cni rdma-netdev ADD "away$number" "away$number" net1 "$network" |
		jq -r '.ips[].address' >>"$LAB_OUT/addresses" || true
done
equal "ten more pods get an address" 10 "$(wc -l <"$LAB_OUT/addresses")"
meet_late given
equal "no address is given on both nodes" 20 "$(sort -u /lab/out/*/addresses | wc -l)"
for number in $(seq 10); do
	check "DEL of pod $number" cni rdma-netdev DEL "away$number" "away$number" net1 "$network"
	ip netns del "away$number"
done
unset RDMA_NETDEV_POLICY
[ "$LAB_GUEST" = 2 ] || api_server start
# A new version of the image on each node, and on node2 an interface that no pod of the cluster has.
by_hand() { RDMA_NETDEV_POLICY=/tmp/away/policy cni rdma-netdev "$1" kept kept net1 "$network"; }
ctr --namespace k8s.io image tag localhost/rdma-netdev:0.1.0 localhost/rdma-netdev:0.1.1
if [ "$LAB_GUEST" = 2 ]; then
	ip netns add kept
	check "an interface by hand" by_hand ADD
fi
meet_late back

if [ "$LAB_GUEST" = 1 ]; then
	step "upgrade: the new version is applied"
	cp -r $manifests /tmp/new
	cat >>/tmp/new/base/kustomization.yaml <<-'NEW'
		images:
		- {name: localhost/rdma-netdev, newTag: 0.1.1}
	NEW
	check "the API server takes it" kubectl apply -k /tmp/new/base
	check "the DaemonSet is rolled out on both nodes" own rollout status ds/rdma-netdev --timeout=600s
	show own get pods -o wide
	equal "each container runs the new image" localhost/rdma-netdev:0.1.1 \
		"$(own get pods -l app.kubernetes.io/name=rdma-netdev -o json |
			jq -r '.items[].spec | (.initContainers + .containers)[].image' | sort -u)"
	equal "the pods have their addresses" "$addresses" "$(for pod in 1 2; do address_of rdma-test-pod-$pod; done)"
	check "and talk as before" in_pod rdma-test-pod-1 ping -c 3 -W 5 "$(tail -n 1 <<<"$addresses")"
	check "both nodes are in order" wait_for 100 kubectl rdma status
	check "a third pod" kubectl apply -f <(sed 's/rdma-test-pod-1/rdma-test-pod-3/' $manifests/examples/perftest/pod-1.yaml)
	check "becomes ready" kubectl wait --for=condition=Ready --timeout=600s pod/rdma-test-pod-3
	equal "and has another address" 3 "$(sort -u <<<"$addresses"$'\n'"$(address_of rdma-test-pod-3)" | wc -l)"

	step "back: the version before is applied"
	check "the API server takes it" kubectl apply -k $manifests/base
	check "the DaemonSet is rolled out on both nodes" own rollout status ds/rdma-netdev --timeout=600s
	equal "each container runs the image before" localhost/rdma-netdev:0.1.0 \
		"$(own get pods -l app.kubernetes.io/name=rdma-netdev -o json |
			jq -r '.items[].spec | (.initContainers + .containers)[].image' | sort -u)"
	equal "the pods have their addresses" "$addresses" "$(for pod in 1 2; do address_of rdma-test-pod-$pod; done)"
	check "and talk as before" in_pod rdma-test-pod-1 ping -c 3 -W 5 "$(tail -n 1 <<<"$addresses")"

	step "the pods end, what was installed goes"
	check "the third pod ends" kubectl delete pod rdma-test-pod-3 --timeout=300s
	check "the pods end" kubectl delete -k $manifests/examples/perftest --timeout=300s

	step "the component uninstall"
	mkdir /tmp/new/ours
	cat >/tmp/new/ours/kustomization.yaml <<-'OURS'
		apiVersion: kustomize.config.k8s.io/v1beta1
		kind: Kustomization
		resources: [../base]
		components: [../components/uninstall]
	OURS
	check "the API server takes it" kubectl apply -k /tmp/new/ours
	waits() { own logs -l app.kubernetes.io/name=rdma-netdev -c uninstall --prefix | grep 'waiting: .*kept'; }
	check "a node waits while there is an interface" wait_for 400 waits
	show waits
fi
meet_late waits
if [ "$LAB_GUEST" = 2 ]; then
	check "its programs are there for DEL" test -x /opt/cni/bin/rdma-netdev
	check "the interface ends" by_hand DEL
	ip netns del kept
fi
meet_late ended
if [ "$LAB_GUEST" = 1 ]; then
	check "both nodes become clean" own rollout status ds/rdma-netdev --timeout=600s
	equal "and have given their addresses back" "" "$(owners)"
	show own logs -l app.kubernetes.io/name=rdma-netdev -c uninstall --prefix
	check "what was installed goes" kubectl delete -k /tmp/new/ours --timeout=300s
	check "so do the policies" kubectl delete -f $manifests/components/admission/objects.yaml
	equal "no document is left" "" "$(kubectl get addresssubnets -o name 2>/dev/null || true)"
fi
meet_late clean
ours() {
	find /opt/cni/bin -name 'rdma-*'
	find /etc/rdma-netdev /var/lib/rdma-netdev /run/rdma-netdev /var/run/cdi -mindepth 1 || true
}
equal "nothing of it is left on the node" "" "$(ours)"
as_before "the host is as before" "$before"
meet_late over
