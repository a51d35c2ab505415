//! ADD of an attachment with an interface of its own: a netdev that moves, or a child.

use std::{fs::File, io::Read};

use attachment::{
    addresses::{self, Ipam},
    journal::{Key, RdmaDevice, Record, record::Slot},
    netdev::{
        obstacle::{self, Addresses},
        replay,
        snapshot::{Identity, Message, Snapshot},
        vf::Vf,
    },
    node::Node,
};
use cni_wire::{AttachmentId, Cidr, CniResult, Code, Interface, IpConfig, Request};
use hca::MacAddress;
use netlink::{
    Namespace, Socket, address,
    link::{self, By, Change, Link},
    route,
};
use netlink_packet_route::{AddressFamily, address::AddressMessage};
use serde_json::Value;

use super::{blank_record, undo};
use crate::{
    apply,
    bind::Bound,
    config::{ChildKind, Config},
    error::Error,
    interface_config::{self, InterfaceConfig},
    plan::{self, Plan, Source},
    rdma::{self, Numbers, RdmaRequirement},
    recover::Recovered,
    report::{self, Reported},
    resolve::{self, HostLink, Parent, Resolved},
};

/// What an ADD works with once everything is resolved and allowed.
pub(super) struct Attachment<'a> {
    pub(super) node: &'a mut Node,
    pub(super) request: &'a Request,
    pub(super) id: &'a AttachmentId,
    pub(super) config: &'a Config,
    pub(super) resolved: &'a Resolved,
    pub(super) pod: &'a Namespace,
    pub(super) inside: &'a mut Socket,
    pub(super) ipam: &'a Ipam,
    pub(super) bound: Option<&'a Bound>,
}

impl Attachment<'_> {
    /// Plans, journals and applies. `before` is the chain's result, `chain` what of it is the
    /// interface's.
    pub(super) fn add(
        mut self,
        key: &Key,
        recovered: Recovered,
        before: CniResult,
        chain: Option<CniResult>,
        moves_rdma: bool,
    ) -> Result<Value, Error> {
        let dns = self.request.config.dns()?;
        let rdma = match moves_rdma {
            true => self.rdma_devices()?,
            false => Vec::new(),
        };
        let interface = self.source(&recovered)?;
        let leased = match chain {
            Some(of_chain) => Some(of_chain),
            None if self.ipam.needs_the_link() => None,
            None => self.ipam.add(self.node, self.request)?,
        };
        let planned = self
            .plan(interface, rdma, leased.as_ref())
            .and_then(|plan| Ok((self.record(&plan)?, plan)))
            .and_then(|(record, plan)| {
                self.node.log.debug(format_args!("plan: {plan}"));
                self.node.journal.create(key, &record)?;
                Ok((record, plan))
            });
        let (mut record, plan) = match planned {
            Ok(planned) => planned,
            Err(error) => {
                return Err(self
                    .ipam
                    .release_after(self.node, self.request, error.into())
                    .into());
            }
        };
        let applied = self
            .apply(key, &plan, &mut record, leased)
            .and_then(|made| {
                if let Some(bound) = self.bound {
                    bound.commit(self.node)?;
                }
                let mut result = before;
                merge(&mut result, made, dns);
                Ok(result.to_json(self.request.config.version)?)
            });
        applied.map_err(|first| {
            // Undoing takes the netdev's lock itself.
            drop(recovered);
            undo(self.node, key, &record, first)
        })
    }

    fn rdma_devices(&self) -> Result<Vec<RdmaDevice>, Error> {
        let Some(host) = self.resolved.host_link() else {
            return Ok(Vec::new());
        };
        let names = rdma::of_netdev(&self.node.roots, &host.link, &host.rdma)?;
        rdma::describe(self.node, &names, self.numbers())
    }

    /// Whether containers were promised the device nodes as they are.
    fn numbers(&self) -> Numbers {
        match self.bound {
            Some(_) => Numbers::ReadAfterwards,
            None => Numbers::Promised,
        }
    }

    /// What becomes the interface.
    fn source(&mut self, recovered: &Recovered) -> Result<Source, Error> {
        match self.resolved {
            Resolved::Move(nic) => {
                let snapshot = self.snapshot(nic, recovered)?;
                Ok(plan::netdev(self.config, nic, snapshot))
            }
            Resolved::Child { kind, parent } => {
                plan::child(self.config, *kind, parent, random_mac()?)
            }
            Resolved::RdmaOnly(_) => Err(Error::new(
                Code::Internal,
                "attach rdma-only has no interface of its own",
            )),
        }
    }

    fn snapshot(&mut self, nic: &HostLink, recovered: &Recovered) -> Result<Snapshot, Error> {
        let node = &mut *self.node;
        let mut taken = Snapshot::take(&mut node.netns.socket, &node.roots.proc, &nic.link)?;
        taken.identity = Identity::on(&node.roots, &nic.link);
        if let Some(address) = &taken.identity.bus_device {
            taken.vf = Vf::take(&node.roots, &mut node.netns.socket, address)?;
        }
        let addresses = match self.ipam {
            Ipam::None => Addresses::OfHost,
            _ => Addresses::OfIpam,
        };
        let socket = &mut node.netns.socket;
        let found = obstacle::obstacles(socket, &nic.link, &taken, addresses)?;
        if let Some(first) = found.first() {
            let refused = format!("moving netdev {} is refused: {}", nic.link.name, first.what);
            let refused = Error::new(Code::Policy, refused).with_details(first.remedy.clone());
            let others = found.iter().skip(1);
            return Err(others.fold(refused, |e, other| e.with_details(other.to_string())));
        }
        taken.pod_mac = self.config.mac.as_ref().map(ToString::to_string);
        if let Some(name) = &recovered.true_name {
            taken.name.clone_from(name);
        }
        Ok(taken)
    }

    fn plan(
        &mut self,
        interface: Source,
        rdma: Vec<RdmaDevice>,
        leased: Option<&CniResult>,
    ) -> Result<Plan, Error> {
        let interface_config = match self.ipam.needs_the_link() {
            true => None,
            false => Some(self.lay_out(interface.snapshot(), leased)?),
        };
        Ok(Plan {
            ifname: self.id.ifname.to_string(),
            netns: self.pod.path().to_owned(),
            rdma,
            interface,
            interface_config,
        })
    }

    fn record(&self, plan: &Plan) -> Result<Record, Error> {
        Ok(Record {
            moved: plan.interface.snapshot().cloned(),
            hcas: self.hcas(),
            slots: self.slots(),
            child: plan.interface.recorded_child(),
            rdma: plan.rdma.clone(),
            rules: rules_of(plan.interface_config.as_ref()),
            ipam: addresses::note(self.request)?,
            ..blank_record(self.node, self.request, self.pod)?
        })
    }

    /// The slot that the runtime passed.
    fn slots(&self) -> Vec<Slot> {
        let allocation = self.config.allocation.iter();
        allocation.filter_map(|one| one.slot.clone()).collect()
    }

    /// The HCAs of a netdev that moves.
    fn hcas(&self) -> Vec<String> {
        match self.resolved {
            Resolved::Move(nic) => nic.hcas.iter().map(ToString::to_string).collect(),
            Resolved::Child { .. } | Resolved::RdmaOnly(_) => Vec::new(),
        }
    }

    fn lay_out(
        &mut self,
        moved: Option<&Snapshot>,
        leased: Option<&CniResult>,
    ) -> Result<InterfaceConfig, Error> {
        let mut interface_config = match moved.filter(|_| leased.is_none()) {
            Some(taken) => InterfaceConfig::of_host(self.config, taken, self.id.ifname.as_str())
                .map_err(|e| {
                    Error::new(Code::Internal, format!("read back {}: {e}", taken.name))
                })?,
            None => {
                let none = CniResult::default();
                let attach = self.resolved.attach();
                InterfaceConfig::of_result(attach, self.config, leased.unwrap_or(&none))
            }
        };
        self.lay_rails(&mut interface_config, leased.is_none())?;
        Ok(interface_config)
    }

    /// Decides about source routing, and keeps the pod's way out where it is.
    fn lay_rails(
        &mut self,
        interface_config: &mut InterfaceConfig,
        of_host: bool,
    ) -> Result<(), Error> {
        for family in route::FAMILIES {
            if interface_config.has_default(family) {
                let main = route::list_table(self.inside, family, replay::MAIN)?;
                interface_config
                    .defaults_of_the_pod
                    .extend(main.iter().any(replay::is_default).then_some(family));
            }
        }
        let rails = &self.config.rails;
        let others = match rails.wanted {
            Some(_) => Vec::new(),
            None => self.families_of_others()?,
        };
        let families = rails.families(
            interface_config,
            &others,
            &interface_config.defaults_of_the_pod,
        );
        if !families.is_empty() {
            let ifname = self.id.ifname.as_str();
            let table = rails.table(ifname, &route::tables(self.inside)?)?;
            rails.apply(interface_config, &families, ifname, table);
        }
        if of_host {
            let stay = interface_config.defaults_of_the_pod.clone();
            interface_config.without_defaults(&stay);
        }
        Ok(())
    }

    /// The families of which the pod's other RDMA interfaces have addresses.
    fn families_of_others(&mut self) -> Result<Vec<AddressFamily>, Error> {
        let mut families = Vec::new();
        // Container and interface stand in the names of the records.
        for (_, _, other) in self.node.journal.list()? {
            if other.container_id != self.id.container_id || other.ifname == self.id.ifname {
                continue;
            }
            let name = other.ifname.as_str();
            let Some(link) = link::get(self.inside, By::Name(name.as_bytes()))? else {
                continue;
            };
            families.extend(
                address::list(self.inside, link.index)?
                    .iter()
                    .filter(|a| !replay::is_link_local(a))
                    .map(|a| a.header.family),
            );
        }
        Ok(families)
    }

    /// Makes the interface and gives it what it is to have. Returns this plugin's own result.
    fn apply(
        &mut self,
        key: &Key,
        plan: &Plan,
        record: &mut Record,
        leased: Option<CniResult>,
    ) -> Result<CniResult, Error> {
        if let Some(moved) = &record.moved {
            let journal = &self.node.journal;
            journal.take(&moved.identity, key, &self.node.boot)?;
        }
        rdma::move_in(self.node, self.pod, &record.rdma, self.numbers())?;
        let link = apply::make(&mut self.node.netns, self.pod, self.inside, plan)
            .map_err(|refused| self.explain(refused))?;
        // Written before the pod runs, which could make links like it.
        let moved = record.moved.as_mut();
        let mut noted = moved.is_some_and(|moved| moved.moved_as(&link));
        if let Some(child) = &mut record.child {
            child.pod_index = Some(link.index);
            noted = true;
        }
        if noted {
            self.node.journal.replace(key, record)?;
        }
        let mut made = leased.unwrap_or_default();
        let late = match &plan.interface_config {
            Some(_) => None,
            None => {
                let what = format!("set {} up", link.name);
                link::change(self.inside, what, link.index, &Change::up())?;
                // What fails from here on is undone with the record, which releases the lease.
                made = self.ipam.add(self.node, self.request)?.unwrap_or_default();
                let late = self.lay_out(None, Some(&made))?;
                if !late.rules.is_empty() {
                    let known = Record {
                        rules: rules_of(Some(&late)),
                        ..record.clone()
                    };
                    self.node.journal.replace(key, &known)?;
                }
                Some(late)
            }
        };
        let none = InterfaceConfig::default();
        let interface_config = plan
            .interface_config
            .as_ref()
            .or(late.as_ref())
            .unwrap_or(&none);
        let attach = self.resolved.attach();
        let link = self.pod.enter(&self.node.netns.namespace, || {
            apply::configure(
                self.inside,
                &self.node.roots.proc,
                &link,
                interface_config,
                attach,
            )
        })??;
        if made.ips.is_empty() {
            made.ips = interface_config
                .addresses
                .iter()
                .filter_map(own_ip)
                .collect();
        }
        // An IPAM does not know our interfaces: every address is of ours.
        for ip in &mut made.ips {
            ip.interface = Some(0);
        }
        interface_config.report_defaults(&mut made, self.request.config.version);
        self.report(plan, &made)?;
        made.interfaces = vec![self.interface(&link, plan)];
        Ok(made)
    }

    /// Names the children that keep the kernel from making one of another kind. Both kinds want the
    /// only handler of received frames that a netdev has (`netdev_rx_handler_register()`). Whose
    /// they are stands in the journal, all of which is read for that: only after a refusal.
    fn explain(&mut self, refused: Error) -> Error {
        let Resolved::Child {
            kind: ChildKind::Macvlan | ChildKind::Ipvlan,
            parent: Parent::OfHost(host),
        } = self.resolved
        else {
            return refused;
        };
        let (attach, netdev) = (self.resolved.attach().as_str(), &host.link.name);
        match resolve::rivals(self.node, &host.link) {
            Ok(Some((kind, whose))) if kind != attach => Error::new(
                Code::InvalidConfig,
                format!(
                    "attach {attach} on {netdev} is refused: it carries {kind} children ({whose}), \
                     and a netdev carries children of one of these kinds"
                ),
            )
            .with_details(format!("set attach to {kind}, or name another netdev"))
            .with_details(refused.to_string()),
            _ => refused,
        }
    }

    /// Waits for the addresses' GIDs, and completes the device information file.
    fn report(&self, plan: &Plan, made: &CniResult) -> Result<(), Error> {
        if self.config.rdma == RdmaRequirement::Off {
            return Ok(());
        }
        let ports = self.resolved.host_link().map(|host| host.rdma.as_slice());
        let function = report::function(plan.interface.link(), self.config);
        let report = Reported {
            ports: ports.unwrap_or_default(),
            addresses: made.ips.iter().map(|ip| ip.address.addr).collect(),
            moved: plan
                .rdma
                .iter()
                .map(|device| device.name.as_str())
                .collect(),
            pci: function.as_deref(),
        };
        report::write(self.node, self.pod, self.id, self.config, &report)
    }

    fn interface(&self, link: &Link, plan: &Plan) -> Interface {
        let moved = plan.interface.snapshot();
        let on_pci = moved.filter(|moved| moved.bus.as_deref() == Some("pci"));
        Interface {
            name: link.name.to_string(),
            mac: (!link.mac.is_empty()).then(|| MacAddress::new(link.mac.as_slice()).to_string()),
            mtu: Some(link.mtu),
            sandbox: self.request.env.netns.clone(),
            socket_path: None,
            pci_id: on_pci.and_then(|moved| moved.identity.bus_device.clone()),
        }
    }
}

fn rules_of(interface_config: Option<&InterfaceConfig>) -> Vec<Message> {
    let rules = interface_config
        .iter()
        .flat_map(|interface_config| &interface_config.rules);
    rules.map(Message::rule).collect()
}

/// A chained ipvlan stands on the chain's only interface, unless a master is named, and without
/// an IPAM it takes over the chain's addresses and routes, as the reference plugin does.
///
/// # Errors
/// Code 7: several interfaces could be meant.
pub(super) fn inherit(
    config: &mut Config,
    before: &mut CniResult,
    ipam: &Ipam,
) -> Result<Option<CniResult>, Error> {
    if config.master.is_none() && config.allocation.is_none() {
        config.master = match before.interfaces.as_slice() {
            [] => None,
            [only] => Some(only.name.clone()),
            several => {
                let names: Vec<&str> = several.iter().map(|i| i.name.as_str()).collect();
                return Err(Error::new(
                    Code::InvalidConfig,
                    format!("prevResult has several interfaces: {}", names.join(", ")),
                )
                .with_details("say with master which one the ipvlan is to stand on"));
            }
        };
    }
    if !matches!(ipam, Ipam::None) || before.ips.is_empty() {
        return Ok(None);
    }
    Ok(Some(CniResult {
        ips: std::mem::take(&mut before.ips),
        routes: std::mem::take(&mut before.routes),
        ..CniResult::default()
    }))
}

fn own_ip(message: &AddressMessage) -> Option<IpConfig> {
    let address = Cidr::new(
        interface_config::own_address(message)?,
        message.header.prefix_len,
    )?;
    Some(IpConfig {
        address,
        gateway: None,
        interface: None,
    })
}

/// A random, locally administered address.
fn random_mac() -> Result<MacAddress, Error> {
    let mut bytes = [0; 6];
    File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(|e| Error::new(Code::Io, format!("read /dev/urandom: {e}")))?;
    // IEEE 802: not a group's address, locally administered.
    bytes[0] = bytes[0] & 0xfc | 0x02;
    Ok(MacAddress::new(bytes))
}

/// Ours first where there was nothing before; else behind what other plugins made, whose
/// numbers must not change.
fn merge(result: &mut CniResult, made: CniResult, dns: cni_wire::Dns) {
    let offset = result.interfaces.len();
    result.interfaces.extend(made.interfaces);
    result.ips.extend(made.ips.into_iter().map(|ip| IpConfig {
        interface: ip.interface.map(|index| index + offset),
        ..ip
    }));
    result.routes.extend(made.routes);
    if !dns.is_empty() {
        result.dns = dns;
    } else if !made.dns.is_empty() {
        result.dns = made.dns;
    }
}
