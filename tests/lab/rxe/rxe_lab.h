/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Soft RoCE with the manners of hardware: for the test lab's guests only,
 * built at test time and never shipped. See README.md in this folder.
 */
#ifndef RXE_LAB_H
#define RXE_LAB_H

#include <linux/netdevice.h>
#include <net/sock.h>
#include <rdma/ib_verbs.h>

struct rxe_dev;

/* Made visible by the edit; rxe_net.c defines them. */
struct socket *rxe_setup_udp_tunnel(struct net *net, __be16 port, bool ipv6);
void rxe_release_udp_tunnel(struct socket *sk);

void rxe_lab_disassociate_ucontext(struct ib_ucontext *context);
struct rxe_dev *rxe_lab_from_upper(struct net_device *upper);
bool rxe_lab_is_netns_move(const struct net_device *ndev);
struct device *rxe_lab_pci_parent(const struct net_device *ndev);
int rxe_lab_net_init(void);
void rxe_lab_net_exit(void);

#endif
