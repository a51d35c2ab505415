// SPDX-License-Identifier: GPL-2.0-only
/*
 * Soft RoCE with the manners of hardware: for the test lab's guests only,
 * built at test time and never shipped. See README.md in this folder.
 */
#include <linux/pci.h>
#include <net/net_namespace.h>
#include <net/netns/generic.h>

#include "rxe.h"
#include "rxe_lab.h"

/*
 * The core moves a device between network namespaces only if the driver can
 * cut user space off from it. Soft RoCE maps no device memory into a process,
 * so there is nothing to cut.
 */
void rxe_lab_disassociate_ucontext(struct ib_ucontext *context)
{
}

struct lab_search {
	struct rxe_dev *found;
};

static int lab_visit_lower(struct net_device *lower, struct netdev_nested_priv *priv)
{
	struct lab_search *search = priv->data;

	search->found = rxe_get_dev_from_net(lower);
	return search->found ? 1 : 0;
}

/*
 * The soft RoCE device of a netdev somewhere beneath @upper, with a reference
 * held; NULL if there is none. Called from the receive path, under RCU.
 */
struct rxe_dev *rxe_lab_from_upper(struct net_device *upper)
{
	struct lab_search search = {};
	struct netdev_nested_priv priv = { .data = &search };

	netdev_walk_all_lower_dev_rcu(upper, lab_visit_lower, &priv);
	return search.found;
}

/* A netdev that leaves a namespace is announced as unregistered in it. */
bool rxe_lab_is_netns_move(const struct net_device *ndev)
{
	return ndev->reg_state == NETREG_REGISTERED;
}

/* The PCI function @ndev hangs below, past buses such as virtio; else NULL. */
struct device *rxe_lab_pci_parent(const struct net_device *ndev)
{
	struct device *dev = ndev->dev.parent;

	while (dev && !dev_is_pci(dev))
		dev = dev->parent;
	return dev;
}

struct lab_sockets {
	struct socket *v4;
	struct socket *v6;
};

static unsigned int lab_sockets_id;

static struct socket *lab_listen(struct net *net, bool ipv6)
{
	struct socket *sock;

	sock = rxe_setup_udp_tunnel(net, htons(ROCE_V2_UDP_DPORT), ipv6);
	return IS_ERR(sock) ? NULL : sock;
}

/* The initial namespace keeps the sockets that the driver itself opens. */
static int __net_init lab_net_start(struct net *net)
{
	struct lab_sockets *sockets = net_generic(net, lab_sockets_id);

	if (net_eq(net, &init_net))
		return 0;
	sockets->v4 = lab_listen(net, false);
	sockets->v6 = lab_listen(net, true);
	return 0;
}

static void __net_exit lab_net_stop(struct net *net)
{
	struct lab_sockets *sockets = net_generic(net, lab_sockets_id);

	rxe_release_udp_tunnel(sockets->v4);
	rxe_release_udp_tunnel(sockets->v6);
}

static struct pernet_operations lab_net_ops = {
	.init = lab_net_start,
	.exit = lab_net_stop,
	.id = &lab_sockets_id,
	.size = sizeof(struct lab_sockets),
};

/* rxe_net_exit also runs when rxe_net_init stopped before it came here. */
static bool lab_net_registered;

int rxe_lab_net_init(void)
{
	int err = register_pernet_subsys(&lab_net_ops);

	lab_net_registered = !err;
	return err;
}

void rxe_lab_net_exit(void)
{
	if (lab_net_registered)
		unregister_pernet_subsys(&lab_net_ops);
	lab_net_registered = false;
}
