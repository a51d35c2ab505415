# A whole real cluster of two nodes moves from the RDMA shared device plugin, macvlan and whereabouts
# lab: guests=2 nics=1 memory=3072 cpus=2 timeout=5400 images=pods,node kubernetes=yes
# lab: peers=k8s-rdma-shared-dp,whereabouts,whereabouts.yaml ports=1
# lab: device=e1000e,id=hca,netdev=wire,bus=port1,romfile= netdev=hubport,id=wire,hubid=0
# lab: binaries=rdma-device-plugin,rdma-netdev,rdma-ipam,rdma-agent,rdmactl
# shellcheck shell=bash disable=SC2016,SC2154

# What docs/migration.md says, in its order and with its commands; no pod is ended by it.

# shellcheck source=tests/lab/guest/cluster.sh
. /lab/guest/cluster.sh
manifests=/lab/manifests
shared=rdma/hca_shared_devices_a

# eth0 is the node's own, ens2f0 the HCA to share: a NIC of PCI, which that plugin needs, so no virtio one.
# Which of the two is found first is not sure.
modprobe e1000e
ip link set "$(ls /sys/bus/pci/drivers/e1000e/*/net)" name ens2f0
# QEMU gives it the same address in each guest.
ip link set ens2f0 address "52:54:00:00:0$LAB_GUEST:fe"
[ -e /sys/class/net/eth0 ] || ip link set eth1 name eth0
node_address "172.20.0.$LAB_GUEST"
make_hca ens2f0 mlx5_0
mount --make-rshared /
start_containerd
ctr --namespace k8s.io image import /lab/node.tar
meet booted
join_cluster "172.20.0.$LAB_GUEST"
meet_late joined

# whereabouts as its installer leaves it on a node.
[ "$LAB_GUEST" = 2 ] || check "whereabouts' objects" kubectl apply -f /lab/peers/whereabouts.yaml
meet_late objects
cp /usr/lib/cni/{macvlan,tuning} /lab/peers/whereabouts /opt/cni/bin/
mkdir -p /etc/cni/net.d/whereabouts.d
kubectl config view --raw >/etc/cni/net.d/whereabouts.d/whereabouts.kubeconfig
kubectl --kubeconfig /etc/cni/net.d/whereabouts.d/whereabouts.kubeconfig config set-credentials me \
	--token "$(own create token whereabouts --duration=24h)"
cat >/etc/cni/net.d/whereabouts.d/whereabouts.conf <<-'CONFIG'
	{"datastore": "kubernetes", "kubernetes": {"kubeconfig": "/etc/cni/net.d/whereabouts.d/whereabouts.kubeconfig"}}
CONFIG
cp /lab/peers/k8s-rdma-shared-dp /usr/local/bin/
meet_late prepared

# old_network: macvlan with tuning and whereabouts; new_network: ours.
network() {
	cat <<-NETWORK
		apiVersion: k8s.cni.cncf.io/v1
		kind: NetworkAttachmentDefinition
		metadata:
		  name: rdma-net
		  annotations: {k8s.v1.cni.cncf.io/resourceName: $shared}
		spec:
		  config: '$1'
	NETWORK
}
old_network() {
	network '{"cniVersion": "0.3.1", "name": "rdma-net", "plugins": [
	  {"type": "macvlan", "master": "ens2f0", "mode": "bridge",
	   "ipam": {"type": "whereabouts", "range": "192.168.111.0/24"}},
	  {"type": "tuning", "sysctl": {"net.ipv4.conf.IFNAME.arp_ignore": "1"}}]}'
}
new_network() {
	network '{"cniVersion": "1.0.0", "name": "rdma-net", "plugins": [
	  {"type": "rdma-netdev", "attach": "macvlan", "master": "ens2f0", "mode": "bridge",
	   "ipam": {"type": "rdma-ipam", "range": "192.168.111.0/24"}}]}'
}
# start POD NODE: a pod there, which holds one unit; it runs when this returns.
start() {
	jq -n --arg pod "$1" --arg node "$2" --arg unit $shared '{apiVersion: "v1", kind: "Pod",
		metadata: {name: $pod, annotations: {"k8s.v1.cni.cncf.io/networks": "rdma-net"}},
		spec: {terminationGracePeriodSeconds: 1, nodeSelector: {"kubernetes.io/hostname": $node},
		  tolerations: [{operator: "Exists"}],
		  containers: [{name: "work", image: "localhost/rdma-tools:1", imagePullPolicy: "IfNotPresent",
		    command: ["sleep", "infinity"], resources: {limits: {($unit): 1}}}]}}' | kubectl apply -f - &&
		kubectl wait --for=condition=Ready --timeout=600s "pod/$1"
}
# in_order STATE POD…: these pods run, each with an address of its own, and each reaches the first of
# them; the HCA is there.
in_order() {
	local state=$1 pod first
	shift
	first=$(address_of "$1")
	equal "$state: $# pods, $# addresses" $# "$(for pod; do address_of "$pod"; done | sort -u | grep -c '^192\.168\.111\.')"
	for pod in "${@:2}"; do
		check "$state: $pod reaches $1" in_pod "$pod" ping -c 3 -W 5 "$first"
	done
	for pod; do
		equal "$state: $pod has its HCA" mlx5_0 "$(in_pod "$pod" ibv_devinfo | awk '/^hca_id/ { print $2 }')"
	done
}
units_of() { kubectl get node "$1" -o json | jq -r '.status.allocatable["'$shared'"] // "none" | sub("k$"; "000")'; }
offers_units() { [ "$(units_of "$1")" = "$2" ]; }
# The pods of the plugin $1 on node $2.
plugin_on() { own get pods -l "$1" --field-selector "spec.nodeName=$2" -o name; }
none_on() { [ -z "$(plugin_on "$@")" ]; }
old_plugin=name=rdma-shared-dp-ds
new_plugin=app.kubernetes.io/name=rdma-netdev
# What whereabouts' objects say is leased: pods, in the order of their addresses.
recorded() { own get ippools -o json | jq -r '[.items[].spec.allocations[].podref] | sort | join(" ")'; }
# addresses COMMAND…: in an agent's container, on any node.
addresses() { own exec ds/rdma-netdev -c rdma-agent -- rdmactl addresses "$@"; }
# imported: the pods whose leases of whereabouts are reserved, in the order of their names.
imported() {
	kubectl get addresssubnets -o json |
		jq -r '[.items[].spec.parts[].reserved // empty | select(startswith("whereabouts: ")) | ltrimstr("whereabouts: ") | rtrimstr(" (held)")] | unique | join(" ")'
}
export_leases() { kubectl rdma addresses --json | /lab/bin/rdmactl addresses export --whereabouts --leases - --yes; }
if [ "$LAB_GUEST" = 1 ]; then
	step "the cluster as it was: RDMA shared device plugin, macvlan, whereabouts"
	cat >/tmp/old.yaml <<-OLD
		apiVersion: v1
		kind: ConfigMap
		metadata: {name: rdma-devices, namespace: kube-system}
		data:
		  config.json: |
		    {"periodicUpdateInterval": 300,
		     "configList": [{"resourceName": "hca_shared_devices_a", "rdmaHcaMax": 1000,
		                     "selectors": {"ifNames": ["ens2f0"]}}]}
		---
		apiVersion: apps/v1
		kind: DaemonSet
		metadata: {name: rdma-shared-dp-ds, namespace: kube-system}
		spec:
		  selector: {matchLabels: {name: rdma-shared-dp-ds}}
		  template:
		    metadata: {labels: {name: rdma-shared-dp-ds}}
		    spec:
		      hostNetwork: true
		      priorityClassName: system-node-critical
		      containers:
		      - name: k8s-rdma-shared-dp-ds
		        image: localhost/rdma-tools:1
		        imagePullPolicy: IfNotPresent
		        command: [/host/bin/k8s-rdma-shared-dp]
		        securityContext: {privileged: true}
		        volumeMounts:
		        - {name: device-plugin, mountPath: /var/lib/kubelet/device-plugins}
		        - {name: plugins-registry, mountPath: /var/lib/kubelet/plugins_registry}
		        - {name: config, mountPath: /k8s-rdma-shared-dev-plugin}
		        - {name: devs, mountPath: /dev/}
		        - {name: program, mountPath: /host/bin}
		        - {name: names, mountPath: /usr/share/misc}
		      volumes:
		      - {name: device-plugin, hostPath: {path: /var/lib/kubelet/device-plugins}}
		      - {name: plugins-registry, hostPath: {path: /var/lib/kubelet/plugins_registry}}
		      - {name: config, configMap: {name: rdma-devices}}
		      - {name: devs, hostPath: {path: /dev/}}
		      - {name: program, hostPath: {path: /usr/local/bin}}
		      - {name: names, hostPath: {path: /usr/share/misc}}
	OLD
	check "that plugin" kubectl apply -f /tmp/old.yaml
	for node in node1 node2; do
		check "$node offers its units" wait_for 300 offers_units $node 1000
	done
	show own logs -l $old_plugin --prefix
	check "the network" kubectl apply -f <(old_network)
	check "a pod on node1" start old1 node1
	check "a pod on node2" start old2 node2
	in_order "before" old1 old2
	equal "whereabouts has two leases" "default/old1 default/old2" "$(recorded)"

	step "node by node: the device plugin"
	cp -r $manifests /tmp/manifests
	mkdir /tmp/manifests/ours
	cat >/tmp/manifests/ours/kustomization.yaml <<-'OVERLAY'
		resources: [../base]
		components: [../components/after-whereabouts]
		configMapGenerator:
		- name: rdma-netdev
		  namespace: kube-system
		  behavior: merge
		  files: [pools.json]
		  options: {disableNameSuffixHash: true}
		patches:
		- target: {kind: DaemonSet}
		  patch: |
		    - op: add
		      path: /spec/template/spec/nodeSelector
		      value: {rdma-plugin: new}
	OVERLAY
	own get configmap rdma-devices -o jsonpath='{.data.config\.json}' >/tmp/manifests/ours/pools.json
	check "that plugin leaves labelled nodes" own patch daemonset rdma-shared-dp-ds --patch '{"spec": {"template": {"spec": {"affinity":
		{"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms":
		[{"matchExpressions": [{"key": "rdma-plugin", "operator": "DoesNotExist"}]}]}}}}}}}'
	check "ours is applied" kubectl apply -k /tmp/manifests/ours
	equal "on no node yet" 0 "$(own get daemonset rdma-netdev -o json | jq .status.desiredNumberScheduled)"
	check "that plugin is on both nodes" own rollout status ds/rdma-shared-dp-ds --timeout=300s
	for node in node1 node2; do
		check "$node: cordoned" kubectl cordon $node
		check "$node: labelled" kubectl label node $node rdma-plugin=new
		check "$node: the old plugin is gone" wait_for 200 none_on $old_plugin $node
		check "$node: the new one is ready" own rollout status ds/rdma-netdev --timeout=600s
		check "$node: it offers what the old one offered" wait_for 100 offers_units $node 1000
		show own logs -l $new_plugin -c rdma-device-plugin --prefix --tail=12
		check "$node: uncordoned" kubectl uncordon $node
		check "$node: a pod by the new plugin and the old network" start "mid-$node" $node
		[ $node = node2 ] || in_order "one node each" old1 old2 mid-node1
	done
	check "node2, back: the label goes" kubectl label node node2 rdma-plugin-
	check "node2: the new plugin is gone" wait_for 200 none_on $new_plugin node2
	check "node2: the old one offers its units" wait_for 200 offers_units node2 1000
	check "node2: a pod by the old plugin again" start again2 node2
	check "node2, forward again" kubectl label node node2 rdma-plugin=new
	check "node2: the old plugin is gone again" wait_for 200 none_on $old_plugin node2
	check "node2: the new one is ready again" own rollout status ds/rdma-netdev --timeout=600s
	check "node2: it offers them again" wait_for 100 offers_units node2 1000
	check "node2: that pod ends" kubectl delete pod again2 --timeout=300s
	# The kubelet forgets a plugin that has been away for five minutes.
	sleep 330
	for node in node1 node2; do equal "$node: its units stay" 1000 "$(units_of $node)"; done
	in_order "both nodes" old1 old2 mid-node1 mid-node2
	check "the old plugin goes" own delete daemonset/rdma-shared-dp-ds configmap/rdma-devices
	restart_kubelet 172.20.0.1
	check "the kubelet starts anew: units are back" wait_for 200 offers_units node1 1000
	sleep 30
	in_order "after the kubelet" old1 old2 mid-node1 mid-node2

	step "the networks, in place"
	ln -s /lab/bin/rdmactl /usr/local/bin/kubectl-rdma
	check "the range is held" addresses hold 192.168.111.0/24
	check "rdma-netdev and rdma-ipam" kubectl apply -f <(new_network)
	check "whereabouts' leases are imported" addresses import 192.168.111.0/24
	show cat <<<"$checked"
	equal "those of all its pods" "default/mid-node1 default/mid-node2 default/old1 default/old2" "$(imported)"
	check "the range is held no longer" addresses unhold 192.168.111.0/24
	show kubectl get addresssubnets
	check "a pod on node1" start new1 node1
	check "a pod on node2" start new2 node2
	in_order "both chains" old1 old2 mid-node1 mid-node2 new1 new2
	equal "whereabouts has the leases of its pods" \
		"default/mid-node1 default/mid-node2 default/old1 default/old2" "$(recorded)"
	show own exec ds/rdma-netdev -c rdma-device-plugin -- rdmactl addresses
	check "pods of the old chain end" kubectl delete pod old1 mid-node2 --timeout=300s
	equal "each lease went with its pod" "default/mid-node1 default/old2" "$(recorded)"
	check "imported again" addresses import 192.168.111.0/24
	equal "their addresses are free" "default/mid-node1 default/old2" "$(imported)"

	step "back to whereabouts"
	check "the range is held" addresses hold 192.168.111.0/24
	check "our leases are exported" export_leases
	equal "whereabouts has all leases" "default/mid-node1 default/new1 default/new2 default/old2" "$(recorded)"
	check "the network as it was" kubectl apply -f <(old_network)
	sleep 120
	check "exported once more" export_leases
	check "a pod of whereabouts" start back1 node1
	in_order "back" old2 mid-node1 new1 new2 back1

	step "forward again"
	check "pods of exported leases end" kubectl delete pod new1 new2 --timeout=300s
	check "rdma-netdev and rdma-ipam" kubectl apply -f <(new_network)
	check "whereabouts' leases are imported" addresses import 192.168.111.0/24
	check "the range is held no longer" addresses unhold 192.168.111.0/24
	check "a pod" start forward1 node1
	in_order "forward" old2 mid-node1 back1 forward1

	step "whereabouts' programs are needed no longer when its pods are gone"
	check "the last pods of the old chain end" kubectl delete pod back1 mid-node1 old2 --timeout=300s
	equal "exported leases stay" "default/new1 default/new2" "$(recorded)"
	# As whereabouts' reconciler, which does not run here.
	check "their entries go" own delete ippools,overlappingrangeipreservations --all
	check "imported for the last time" addresses import 192.168.111.0/24
	equal "nothing is reserved" "" "$(imported)"
fi
meet_late chained
rm /opt/cni/bin/{whereabouts,macvlan,tuning}
rm -r /etc/cni/net.d/whereabouts.d
meet_late removed

if [ "$LAB_GUEST" = 1 ]; then
	step "rdma-ipam alone"
	check "without whereabouts" kubectl apply -k $manifests/base
	check "each node's pod is replaced" own rollout status ds/rdma-netdev --timeout=600s
	check "a pod on node1" start ours1 node1
	check "a pod on node2" start ours2 node2
	in_order "rdma-ipam" forward1 ours1 ours2
	check "whereabouts' definitions go" kubectl delete --timeout=100s crd \
		ippools.whereabouts.cni.cncf.io nodeslicepools.whereabouts.cni.cncf.io overlappingrangeipreservations.whereabouts.cni.cncf.io
	check "the label goes, too" kubectl label nodes --all rdma-plugin-
	check "a pod more" start last1 node1
	in_order "over" forward1 ours1 ours2 last1
	check "all nodes are in order" wait_for 100 kubectl rdma status
	show cat <<<"$checked"
	check "all pods end" kubectl delete pod forward1 ours1 ours2 last1 --timeout=300s
fi
meet_late over
