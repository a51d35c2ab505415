//! ADD of an attachment with interfaces of its own: netdevs that move, or children. There is one, or
//! with `devices: all` one for each NIC of the pod.
//!
//! All addresses are leased by one order, and one record names all parts before the first is made;
//! what fails at any of them undoes all.

use std::{collections::BTreeSet, fs::File, io::Read};

use attachment::{
    addresses::{self, Ipam},
    child::IPOIB,
    journal::{Lock, Part, RdmaDevice, Record, record::Slot},
    netdev::{
        obstacle::{self, Addresses},
        replay,
        snapshot::{Identity, Message, Snapshot},
        vf::Vf,
    },
    node::Node,
};
use cni_wire::{Cidr, CniResult, Code, Interface, IpConfig};
use hca::MacAddress;
use netlink::{
    Name, address,
    link::{self, By, Change, Link},
    route,
};
use netlink_packet_route::{AddressFamily, address::AddressMessage};
use node::policy::FabricAddresses;
use serde_json::Value;

use super::{Add, Nic};
use crate::{
    apply,
    config::{ChildKind, Config, Devices},
    error::Error,
    interface_config::{self, InterfaceConfig},
    plan::{self, Plan, Source},
    rdma::{self, Numbers, RdmaRequirement},
    recover::Recovered,
    report::{self, Reported},
    resolve::{self, HostLink, Parent, Resolved},
};

/// An interface that was made.
struct Made {
    link: Link,
    /// What its addresses and routes are, as a result.
    result: CniResult,
    /// What it is given, where that was not known when it was planned.
    late: Option<InterfaceConfig>,
}

impl Add<'_> {
    /// Plans, journals and applies. `before` is the chain's result, `chain` what of it is the
    /// interface's.
    pub(super) fn make(
        &mut self,
        nics: Vec<Nic>,
        before: CniResult,
        chain: Option<CniResult>,
    ) -> Result<Value, Error> {
        let dns = self.request.config.dns()?;
        let mut sources = Vec::new();
        for nic in &nics {
            let rdma = match nic.moves_rdma {
                true => self.rdma_devices(nic)?,
                false => Vec::new(),
            };
            sources.push((self.source(nic)?, rdma));
        }
        let leased = self.lease(&nics, chain)?;
        let planned = self
            .plans(&nics, sources, &leased)
            .and_then(|plans| Ok((self.record(&nics, &plans)?, plans)))
            .and_then(|(record, plans)| {
                for plan in &plans {
                    self.node.log.debug(format_args!("plan: {plan}"));
                }
                let kept = self.keep_parents(&nics)?;
                match nics.iter().any(|nic| nic.taken.is_some()) {
                    true => self.node.journal.replace(self.key, &record)?,
                    false => self.node.journal.create(self.key, &record)?,
                }
                Ok((record, plans, kept))
            });
        let (mut record, plans, kept) = match planned {
            Ok(planned) => planned,
            Err(error) => {
                return Err(self
                    .ipam
                    .release_after(self.node, self.request, error.into())
                    .into());
            }
        };
        let applied = self
            .apply(&nics, &plans, &mut record, leased, kept)
            .and_then(|made| {
                if let Some(bound) = self.bound {
                    bound.commit(self.node)?;
                }
                let mut result = before;
                merge(&mut result, made, dns);
                Ok(result.to_json(self.request.config.version))
            });
        applied.map_err(|first| {
            // Undoing takes the netdevs' locks itself.
            drop(nics);
            self.undo(&record, first)
        })
    }

    /// Keeps netdevs of the host from being moved until the children on them are made. A move that was
    /// quicker has taken the netdev, and the kernel refuses the child.
    fn keep_parents(&self, nics: &[Nic]) -> Result<Vec<Lock>, Error> {
        let mut kept = Vec::new();
        for nic in nics {
            if let Resolved::Child { parent, .. } = &nic.resolved
                && let Some(host) = parent.of_host()
            {
                let identity = Identity::on(&self.node.roots, &host.link);
                kept.push(self.node.journal.lock_in_place(&identity)?);
            }
        }
        Ok(kept)
    }

    /// Leases the addresses of all interfaces, by their order; none where the chain gave them, or the
    /// IPAM wants to see the interface first.
    fn lease(
        &mut self,
        nics: &[Nic],
        chain: Option<CniResult>,
    ) -> Result<Vec<Option<CniResult>>, Error> {
        let rails: Option<Vec<u32>> = nics.iter().map(|nic| nic.rail).collect();
        Ok(match (chain, rails) {
            (Some(of_chain), _) => vec![Some(of_chain)],
            (None, Some(rails)) if nics.len() > 1 || matches!(self.ipam, Ipam::Own) => {
                self.ipam.add_rails(self.node, self.request, &rails)?
            }
            (None, _) if self.ipam.needs_the_link() => vec![None],
            (None, _) => vec![self.ipam.add(self.node, self.request)?],
        })
    }

    fn rdma_devices(&self, nic: &Nic) -> Result<Vec<RdmaDevice>, Error> {
        let Some(host) = nic.resolved.host_link() else {
            return Ok(Vec::new());
        };
        let names = rdma::of_netdev(&self.node.roots, &host.link, &host.rdma)?;
        rdma::describe(self.node, &names, self.numbers())
    }

    /// Whether containers were promised the device nodes as they are.
    fn numbers(&self) -> Numbers {
        Numbers::of(self.bound.is_some())
    }

    /// What becomes an interface.
    fn source(&mut self, nic: &Nic) -> Result<Source, Error> {
        match &nic.resolved {
            Resolved::Move(host) => {
                let snapshot = match &nic.taken {
                    Some(taken) => taken.clone(),
                    None => snapshot(self.node, self.ipam, host, &nic.recovered)?,
                };
                Ok(plan::netdev(&nic.config, host, snapshot))
            }
            Resolved::Child { kind, parent } => {
                plan::child(&nic.config, *kind, parent, random_mac()?)
            }
            Resolved::RdmaOnly(_) => Err(Error::new(
                Code::Internal,
                "attach rdma-only has no interface of its own",
            )),
        }
    }

    fn plans(
        &mut self,
        nics: &[Nic],
        sources: Vec<(Source, Vec<RdmaDevice>)>,
        leased: &[Option<CniResult>],
    ) -> Result<Vec<Plan>, Error> {
        let mut configs: Vec<Option<InterfaceConfig>> = match self.ipam.needs_the_link() {
            true => sources.iter().map(|_| None).collect(),
            false => {
                let all = nics.iter().zip(&sources).zip(leased);
                let all: Vec<_> = all
                    .map(|((nic, (source, _)), leased)| {
                        Ok((
                            nic,
                            given(nic, source.snapshot(), leased.as_ref())?,
                            leased.is_none(),
                        ))
                    })
                    .collect::<Result<_, Error>>()?;
                let laid_out = self.lay_out(all)?;
                laid_out.into_iter().map(Some).collect()
            }
        };
        let plans = nics.iter().zip(sources).zip(configs.drain(..));
        let plan = |((nic, (interface, rdma)), interface_config): ((&Nic, _), _)| Plan {
            ifname: nic.ifname.to_string(),
            netns: self.pod.path().to_owned(),
            rdma,
            interface,
            interface_config,
        };
        Ok(plans.map(plan).collect())
    }

    fn record(&self, nics: &[Nic], plans: &[Plan]) -> Result<Record, Error> {
        let part = |(nic, plan): (&Nic, &Plan)| Part {
            ifname: plan.ifname.clone(),
            rail: nic.rail,
            moved: plan.interface.snapshot().cloned(),
            hcas: hcas(&nic.resolved),
            slots: slots(&nic.config),
            returned: false,
            child: plan.interface.recorded_child(),
            rdma: plan.rdma.clone(),
            rules: rules_of(plan.interface_config.as_ref()),
        };
        Ok(Record {
            ipam: addresses::note(self.request)?,
            ..self.record_of(nics.iter().zip(plans).map(part).collect())
        })
    }

    /// Decides about source routing, and keeps the pod's way out where it is. Each interface comes with
    /// what it is given and whether that is the host's.
    fn lay_out(
        &mut self,
        given: Vec<(&Nic, InterfaceConfig, bool)>,
    ) -> Result<Vec<InterfaceConfig>, Error> {
        let mut families = None;
        let mut tables: Option<BTreeSet<u32>> = None;
        let own: Vec<Vec<AddressFamily>> = given
            .iter()
            .map(|(_, interface_config, _)| interface_config.families())
            .collect();
        let mut laid_out: Vec<InterfaceConfig> = Vec::new();
        for (number, (nic, mut interface_config, of_host)) in given.into_iter().enumerate() {
            for family in route::FAMILIES {
                if interface_config.has_default(family)
                    && self.pod_has_default(family, &laid_out)?
                {
                    interface_config.defaults_of_the_pod.push(family);
                }
            }
            let rails = &nic.config.rails;
            let mut others = match (rails.wanted, &families) {
                (Some(_), _) => Vec::new(),
                (None, Some(known)) => Vec::clone(known),
                (None, None) => families.insert(self.families_of_others()?).clone(),
            };
            let siblings = own.iter().enumerate().filter(|(other, _)| *other != number);
            others.extend(siblings.flat_map(|(_, families)| families));
            let due = rails.families(
                &interface_config,
                &others,
                &interface_config.defaults_of_the_pod,
            );
            if !due.is_empty() {
                let ifname = nic.ifname.as_str();
                let used = match &mut tables {
                    Some(used) => used,
                    none => none.insert(route::tables(self.inside)?),
                };
                let table = rails.table(ifname, nic.rail, used)?;
                used.insert(table);
                rails.apply(&mut interface_config, &due, ifname, table);
            }
            let v6 = AddressFamily::Inet6;
            if nic.config.accept_ra
                && rails.wanted != Some(false)
                && (due.contains(&v6) || own.len() > 1 || self.pod_has_default(v6, &laid_out)?)
            {
                interface_config.without_advertised_default();
            }
            if of_host {
                let stay = interface_config.defaults_of_the_pod.clone();
                interface_config.without_defaults(&stay);
            }
            laid_out.push(interface_config);
        }
        Ok(laid_out)
    }

    /// Whether the pod has a default route of a family. The first of several interfaces that has one
    /// leads out of the pod.
    fn pod_has_default(
        &mut self,
        family: AddressFamily,
        laid_out: &[InterfaceConfig],
    ) -> Result<bool, Error> {
        let is_led = laid_out.iter().any(|earlier| earlier.has_default(family));
        let main = route::list_table(self.inside, family, replay::MAIN, |length| length == 0)?;
        Ok(is_led || main.iter().any(replay::is_default))
    }

    /// The families of which the pod's other RDMA interfaces have addresses.
    fn families_of_others(&mut self) -> Result<Vec<AddressFamily>, Error> {
        let mut families = Vec::new();
        // Container and interface stand in the names of the records.
        for (_, _, other) in self.node.journal.list()? {
            if other.container_id != self.id.container_id || other.ifname == self.id.ifname {
                continue;
            }
            // With several interfaces, the first is known by this name, too.
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

    /// Makes the interfaces and gives them what they are to have. Returns this plugin's own result.
    fn apply(
        &mut self,
        nics: &[Nic],
        plans: &[Plan],
        record: &mut Record,
        leased: Vec<Option<CniResult>>,
        kept: Vec<Lock>,
    ) -> Result<CniResult, Error> {
        for moved in record.parts.iter().filter_map(|part| part.moved.as_ref()) {
            let journal = &self.node.journal;
            journal.take(&moved.identity, self.key, &self.node.boot)?;
        }
        let devices: Vec<RdmaDevice> = record.rdma().cloned().collect();
        rdma::move_in(self.node, self.pod, &devices, self.numbers())?;
        let mut links = Vec::new();
        for (nic, plan) in nics.iter().zip(plans) {
            let link = apply::make(&mut self.node.netns, self.pod, self.inside, plan)
                .map_err(|refused| self.explain(nic, refused))?;
            links.push(link);
        }
        drop(kept);
        // Written before the pod runs, which could make links like them.
        let mut noted = false;
        for (part, link) in record.parts.iter_mut().zip(&links) {
            if let Some(child) = &mut part.child {
                child.pod_index = Some(link.index);
                if child.kind == IPOIB {
                    child.mac = Some(MacAddress::new(link.mac.as_slice()).to_string());
                }
                noted = true;
            }
        }
        if noted {
            self.node.journal.replace(self.key, record)?;
        }
        self.name_the_first(&links)?;
        let mut made = Vec::new();
        for ((link, plan), leased) in links.into_iter().zip(plans).zip(leased) {
            made.push(self.late(nics, record, link, plan, leased)?);
        }
        self.configure(nics, plans, &mut made)?;
        if self.note_carriers(nics, plans, &made, record)? {
            self.node.journal.replace(self.key, record)?;
        }
        let mut ready = Vec::new();
        for ((nic, plan), made) in nics.iter().zip(plans).zip(made) {
            ready.push(self.answer(nic, plan, made));
        }
        self.report(nics, plans, &ready)?;
        Ok(joined(ready))
    }

    /// Gives the first interface the name of the call, under which runtimes search for it, where no
    /// interface has that.
    fn name_the_first(&mut self, links: &[Link]) -> Result<(), Error> {
        let name = Name::from(self.id.ifname.as_str());
        match links.first() {
            Some(first) if links.iter().all(|link| link.name != name) => {
                Ok(link::add_altname(self.inside, first, &name)?)
            }
            _ => Ok(()),
        }
    }

    /// Asks an IPAM for addresses that wants to see the interface first.
    fn late(
        &mut self,
        nics: &[Nic],
        record: &mut Record,
        link: Link,
        plan: &Plan,
        leased: Option<CniResult>,
    ) -> Result<Made, Error> {
        if plan.interface_config.is_some() {
            let result = leased.unwrap_or_default();
            return Ok(Made {
                link,
                result,
                late: None,
            });
        }
        let what = format!("set {} up", link.name);
        link::change(self.inside, what, link.index, &Change::up())?;
        // What fails from here on is undone with the record, which releases the lease.
        let result = self.ipam.add(self.node, self.request)?.unwrap_or_default();
        let nic = nics.iter().map(|nic| {
            let given = given(nic, None, Some(&result))?;
            Ok((nic, given, false))
        });
        let nic = nic.collect::<Result<_, Error>>()?;
        let late = self.lay_out(nic)?.pop();
        let rules = rules_of(late.as_ref());
        if !rules.is_empty() {
            for part in &mut record.parts {
                part.rules.clone_from(&rules);
            }
            self.node.journal.replace(self.key, record)?;
        }
        Ok(Made { link, result, late })
    }

    /// Gives all interfaces what they are to have, and announces them.
    fn configure(&mut self, nics: &[Nic], plans: &[Plan], made: &mut [Made]) -> Result<(), Error> {
        let (inside, proc) = (&mut *self.inside, &self.node.roots.proc);
        let attached = nics.iter().map(|nic| nic.resolved.attach());
        self.pod.enter(&self.node.netns.namespace, || {
            let mut announced = Vec::new();
            for ((made, plan), attach) in made.iter_mut().zip(plans).zip(attached) {
                let Some(interface_config) = made.late.as_ref().or(plan.interface_config.as_ref())
                else {
                    continue;
                };
                made.link = apply::configure(inside, proc, &made.link, interface_config)?;
                announced.push((&mut made.link, interface_config, attach));
            }
            apply::announce(inside, announced)
        })??;
        Ok(())
    }

    /// Refuses IPoIB children without a carrier, unless the policy allows them. Then the record is to
    /// say so, for CHECK and status. True where it does.
    fn note_carriers(
        &self,
        nics: &[Nic],
        plans: &[Plan],
        made: &[Made],
        record: &mut Record,
    ) -> Result<bool, Error> {
        let mut noted = false;
        let parts = nics.iter().zip(plans).zip(made).zip(&mut record.parts);
        for (((nic, plan), made), part) in parts {
            let given = made.late.as_ref().or(plan.interface_config.as_ref());
            let is_used = given.is_some_and(|given| !given.announced.is_empty());
            if !is_used || !made.link.is_infiniband() || made.link.carrier {
                continue;
            }
            let member = plan::has_partition(&nic.resolved, &nic.config);
            let why = member.err().map_or_else(
                || {
                    "the port is not active, or the subnet manager has not made the broadcast \
                     group of its partition; ibstat shows the port"
                        .to_owned()
                },
                |error| error.msg.clone(),
            );
            let warning = format!("{} has no carrier: {why}", made.link.name);
            if let Some(child) = &mut part.child {
                if !self.node.policy.values.allow.inactive_partitions {
                    return Err(Error::new(Code::TryAgain, warning).with_details(format!(
                        "to start pods before the partition is active, set \
                         allow.inactivePartitions in {}",
                        self.node.policy.path.display()
                    )));
                }
                child.warning = Some(warning.clone());
                noted = true;
            }
            self.node.log.warn(format_args!("{}: {warning}", self.id));
        }
        Ok(noted)
    }

    /// What is answered of one interface: its part of the result, with interface number 0.
    fn answer(&self, nic: &Nic, plan: &Plan, made: Made) -> CniResult {
        let Made {
            link,
            mut result,
            late,
        } = made;
        let none = InterfaceConfig::default();
        let interface_config = plan
            .interface_config
            .as_ref()
            .or(late.as_ref())
            .unwrap_or(&none);
        if result.ips.is_empty() {
            result.ips = interface_config
                .addresses
                .iter()
                .filter_map(own_ip)
                .collect();
        }
        // An IPAM does not know our interfaces: every address is of ours.
        for ip in &mut result.ips {
            ip.interface = Some(0);
        }
        interface_config.report_defaults(&mut result, self.request.config.version);
        if nic.config.devices == Devices::All {
            name_gateways(&mut result);
        }
        result.interfaces = vec![self.interface(&link, plan)];
        result
    }

    /// Names the children that keep the kernel from making one of another kind. Both kinds want the
    /// only handler of received frames that a netdev has (`netdev_rx_handler_register()`). Whose
    /// they are stands in the journal, all of which is read for that: only after a refusal.
    fn explain(&mut self, nic: &Nic, refused: Error) -> Error {
        let Resolved::Child {
            kind: ChildKind::Macvlan | ChildKind::Ipvlan,
            parent: Parent::OfHost(host),
        } = &nic.resolved
        else {
            return refused;
        };
        let (attach, netdev) = (nic.resolved.attach().as_str(), &host.link.name);
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
    fn report(&self, nics: &[Nic], plans: &[Plan], ready: &[CniResult]) -> Result<(), Error> {
        let Some(first) = nics.first() else {
            return Ok(());
        };
        if first.config.rdma == RdmaRequirement::Off {
            return Ok(());
        }
        let report = |((nic, plan), ready): ((&_, &_), &CniResult)| {
            let (nic, plan): (&Nic, &Plan) = (nic, plan);
            let ports = nic.resolved.host_link().map(|host| host.rdma.as_slice());
            Reported {
                ifname: nic.ifname.to_string(),
                ports: ports.unwrap_or_default().to_vec(),
                addresses: ready.ips.iter().map(|ip| ip.address.addr).collect(),
                moved: plan.rdma.iter().map(|device| device.name.clone()).collect(),
                pci: report::function(plan.interface.link(), &nic.config),
            }
        };
        let parts = nics.iter().zip(plans).zip(ready);
        let parts: Vec<Reported> = parts.map(report).collect();
        report::write(self.node, self.pod, self.id, &first.config, &parts)
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

/// The state of a netdev that is to move.
///
/// # Errors
/// Code 101 naming what keeps it from being moved; the kernel's refusal.
pub(super) fn snapshot(
    node: &mut Node,
    ipam: &Ipam,
    nic: &HostLink,
    recovered: &Recovered,
) -> Result<Snapshot, Error> {
    let mut taken = Snapshot::take(&mut node.netns.socket, &node.roots.proc, &nic.link)?;
    taken.identity = Identity::on(&node.roots, &nic.link);
    if let Some(address) = &taken.identity.bus_device {
        taken.vf = Vf::take(&node.roots, &mut node.netns.socket, address)?;
    }
    let addresses = match ipam {
        Ipam::None => Addresses::OfHost,
        _ => Addresses::OfIpam,
    };
    let fabric = node.policy.values.fabric_addresses;
    taken.static_addresses =
        addresses == Addresses::OfHost && fabric == FabricAddresses::Static && !nic.rdma.is_empty();
    let socket = &mut node.netns.socket;
    let found = obstacle::obstacles(socket, &node.roots.proc, &nic.link, &taken, addresses)?;
    if let Some(first) = found.first() {
        let refused = format!("moving netdev {} is refused: {}", nic.link.name, first.what);
        let refused = Error::new(Code::Policy, refused).with_details(first.remedy.clone());
        let others = found.iter().skip(1);
        return Err(others.fold(refused, |e, other| e.with_details(other.to_string())));
    }
    let stay = taken.leased_addresses();
    if addresses == Addresses::OfHost && !taken.static_addresses && !stay.is_empty() {
        node.log.warn(format_args!(
            "{} leaves addresses with a lifetime on the host: {}; to take them along, set \
             \"fabricAddresses\": \"static\" in {}",
            taken.name,
            stay.join(", "),
            node.policy.path.display()
        ));
    }
    if let Some(name) = &recovered.true_name {
        taken.name.clone_from(name);
    }
    Ok(taken)
}

/// The slot that the runtime passed.
fn slots(config: &Config) -> Vec<Slot> {
    let allocation = config.allocation.iter();
    allocation.filter_map(|one| one.slot.clone()).collect()
}

/// The HCAs of a netdev that moves.
fn hcas(resolved: &Resolved) -> Vec<String> {
    match resolved {
        Resolved::Move(host) => host.hcas.iter().map(ToString::to_string).collect(),
        Resolved::Child { .. } | Resolved::RdmaOnly(_) => Vec::new(),
    }
}

/// What an interface is given: what was leased, else what its netdev had on the host.
fn given(
    nic: &Nic,
    moved: Option<&Snapshot>,
    leased: Option<&CniResult>,
) -> Result<InterfaceConfig, Error> {
    let (config, attach) = (&nic.config, nic.resolved.attach());
    let given = match moved.filter(|_| leased.is_none()) {
        Some(taken) => InterfaceConfig::of_host(config, taken, nic.ifname.as_str())
            .map_err(|e| Error::new(Code::Internal, format!("read back {}: {e}", taken.name)))?,
        None => {
            let none = CniResult::default();
            InterfaceConfig::of_result(attach, config, leased.unwrap_or(&none))?
        }
    };
    let link = nic.resolved.link();
    let mtu = config.mtu.or(link.map(|link| link.mtu)).unwrap_or_default();
    plan::carries_ipv6(mtu, config, given.needs_ipv6())?;
    Ok(given)
}

/// Says of each route of one interface which gateway it has: of several interfaces, each has its own.
fn name_gateways(result: &mut CniResult) {
    let routes = result.routes.iter();
    let hops: Vec<_> = routes
        .map(|route| interface_config::next_hop(route, result))
        .collect();
    for (route, hop) in result.routes.iter_mut().zip(hops) {
        route.gw = hop;
    }
}

/// One result of several interfaces.
fn joined(parts: Vec<CniResult>) -> CniResult {
    let mut all = CniResult::default();
    for mut part in parts {
        part.routes.retain(|route| !all.routes.contains(route));
        merge(&mut all, part, cni_wire::Dns::default());
    }
    all
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
