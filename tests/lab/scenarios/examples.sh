# The networks and workers of manifests/examples, from their own files: children, moves, rails
# lab: memory=1536 nics=3 timeout=600 images=pods
# lab: binaries=rdma-device-plugin,rdma-netdev,rdma-ipam,rdmactl standins=kubelet-standin,multus-standin
# shellcheck shell=bash disable=SC2016,SC2154

networks=/lab/manifests/examples/networks
rails=/lab/manifests/examples/rails
# eth0 is not an HCA. The profile exclusive offers netdevs named rdma*.
for nic in 0 1; do
	ip link set "eth$((nic + 1))" name "rdma$nic"
	make_hca "rdma$nic" "mlx5_$nic"
	ip addr add "10.77.$nic.1/24" dev "rdma$nic"
	wait_for 20 settled "rdma$nic"
done
start_containerd
install_cni $networks $rails
start_kubelet

step "the chart's default pool: children of the HCA that was allocated to the pod"
before=$(host_state)
shared=rdma/hca_shared_devices_a
cat >/tmp/default.json <<-POOLS
	{"version": 1, "pools": [
	  {"resource": "$shared", "mode": "shared", "shares": 63, "select": {"functions": ["pf"]}}]}
POOLS
start_daemon /tmp/default.json
check "the kubelet learns of both HCAs' shares" kubelet-standin node --patience 60 --wait $shared=126
check "rdma-macvlan: a pod runs" worker macvlan rdma-macvlan "$shared: 1"
check "rdma-ipvlan: a pod runs" worker ipvlan rdma-ipvlan "$shared: 1"
for kind in macvlan ipvlan; do
	contains "$kind: its kind of interface" "$kind" "$(in_pod $kind ip -d link show net1)"
	contains "$kind: an address of the range" '^192\.168\.112\.' "$(address_of $kind net1)"
	equal "$kind: one HCA" 1 "$(in_pod $kind ibv_devinfo | grep -c hca_id)"
done
check "both end" kubelet-standin delete-pod macvlan ipvlan
as_before "the host is as before" "$before"
kill %?rdma-device-plugin && wait %?rdma-device-plugin || true

step "profile exclusive: the NIC itself"
start_profile exclusive
check "the kubelet learns of both NICs" kubelet-standin node --patience 60 --wait rdma/nic=2
check "rdma-move: a pod runs" worker move rdma-move "rdma/nic: 1"
contains "it has a NIC with the address of the host's" '^10\.77\.[01]\.1/24$' "$(address_of move net1)"
check "it ends" kubelet-standin delete-pod move
for nic in rdma0 rdma1; do wait_for 20 settled $nic; done
as_before "the host is as before" "$before"

step "rails: two NICs in one subnet, of the StatefulSet's own file with two instead of eight"
sed -E -e '/nvidia\.com/d' -e 's|(rdma/nic): 8|\1: 2|' -e 's|(networks: rdma-rail, rdma-rail).*|\1|' \
	$rails/workers.yaml >/tmp/workers.yaml
# Its MTU is what a real NIC has.
for nic in 0 1; do ip link set "rdma$nic" mtu 9000 && wait_for 20 settled "rdma$nic"; done
before=$(host_state)
check "the kubelet learns that both NICs are there" kubelet-standin node --patience 60 --wait rdma/nic=2
check "a worker runs" kubelet-standin run-pod /tmp/workers.yaml
for net in net1 net2; do
	contains "$net has an address of the range" '^10\.64\.' "$(address_of rails-0 $net)"
	address=$(address_of rails-0 $net)
	contains "$net has a table for what comes from it" "from ${address%/*}" "$(in_pod rails-0 ip rule)"
	contains "$net keeps its address to itself" 1 "$(in_pod rails-0 cat /proc/sys/net/ipv4/conf/$net/arp_ignore)"
done
equal "no rail has the pod's default route" "" "$(in_pod rails-0 ip route show default | grep 'dev net' || true)"
equal "the two NICs are two HCAs" 2 "$(in_pod rails-0 ibv_devinfo | grep -c hca_id)"
check "it ends" kubelet-standin delete-pod rails-0
for nic in rdma0 rdma1; do wait_for 20 settled $nic; done
as_before "the host is as before" "$before"
equal "no lease is left" "[]" "$(rdmactl addresses --json | jq -c .leases)"
