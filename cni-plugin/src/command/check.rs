//! CHECK: the pod still has what ADD answered. Changes nothing; additions by others are allowed.

use attachment::{
    addresses::Ipam,
    journal::Key,
    netdev::{display, replay},
    node::Node,
    part::{Interface, Part},
    rdma,
};
use cni_wire::{CniResult, Code, Command, Request};
use netlink::{
    Socket, address,
    link::{self, By, Link},
    route, rule,
};
use netlink_packet_route::AddressFamily;

use super::pod_namespace;
use crate::{addressing, bind, error::Error};

/// Serves CHECK.
///
/// # Errors
/// Code 104 naming what differs; code 7 without a `prevResult`.
pub fn run(mut node: Node, request: &Request) -> Result<(), Error> {
    let id = request.attachment()?;
    let before = request.config.prev_result()?.ok_or_else(|| {
        let remedy = "CHECK compares with what ADD answered";
        Error::advise(Code::InvalidConfig, "prevResult is missing", remedy)
    })?;
    before.check_indexes()?;
    let pod = pod_namespace(&node, request)?;
    let recorded = match Key::of(&request.config.name, id) {
        Some(key) => node.journal.read(&key)?,
        None => None,
    };
    let Some(recorded) = recorded else {
        return Err(differs(format!("the journal knows no attachment of {id}")));
    };
    let mut inside = pod.socket(&node.netns.namespace)?;
    let sandbox = request.env.netns.as_deref();
    for part in &recorded.parts {
        // Of rdma-only the interface is another plugin's.
        if let Some(interface) = part.interface() {
            let link = check_interface(&mut inside, &before, sandbox, interface)?;
            if let Some(child) = part.child() {
                child.check(&link)?;
            }
            if link.is_infiniband() && !link.carrier {
                let known = part.child().and_then(|child| child.warning.as_deref());
                node.log
                    .warn(known.unwrap_or("the interface has no carrier; ibstat shows the port"));
            }
        }
        if let Some(moved) = part.moved() {
            moved.check(&mut node)?;
        }
        rdma::check(&node, &pod, part.rdma())?;
        bind::check(&node, part.slots())?;
    }
    let ipam = Ipam::of(&node, request)?;
    drop(inside);
    let rails: Option<Vec<u32>> = recorded.parts.iter().map(Part::rail).collect();
    Ok(ipam.ask(&node, Command::Check, request, rails.as_deref())?)
}

/// One interface of the attachment.
fn check_interface(
    inside: &mut Socket,
    before: &CniResult,
    sandbox: Option<&str>,
    interface: &Interface,
) -> Result<Link, Error> {
    let position = before
        .interfaces
        .iter()
        .position(|i| i.name == interface.name && i.sandbox.as_deref() == sandbox);
    let Some((index, expected)) = position.and_then(|i| Some((i, before.interfaces.get(i)?)))
    else {
        return Err(differs(format!(
            "prevResult has no interface {} in {}",
            interface.name,
            sandbox.unwrap_or("the pod")
        )));
    };
    let link = link::get(inside, By::Name(expected.name.as_bytes()))?
        .ok_or_else(|| differs(format!("{} is gone from the pod", expected.name)))?;
    check_link(expected, &link)?;
    check_addresses(inside, before, index, &link)?;
    check_routes(inside, before, index, &link)?;
    check_rules(inside, interface)?;
    Ok(link)
}

fn differs(msg: String) -> Error {
    Error::new(Code::Differs, msg)
}

fn check_link(expected: &cni_wire::Interface, link: &Link) -> Result<(), Error> {
    let mac = link.mac_text();
    if let Some(before) = expected
        .mac
        .as_ref()
        .filter(|before| !before.eq_ignore_ascii_case(&mac))
    {
        return Err(differs(format!(
            "{} has MAC address {mac}, had {before}",
            link.name
        )));
    }
    if let Some(before) = expected.mtu.filter(|before| *before != link.mtu) {
        return Err(differs(format!(
            "{} has MTU {}, had {before}",
            link.name, link.mtu
        )));
    }
    if !link.is_up() {
        return Err(differs(format!("{} is down", link.name)));
    }
    Ok(())
}

fn check_addresses(
    inside: &mut Socket,
    before: &CniResult,
    index: usize,
    link: &Link,
) -> Result<(), Error> {
    let addresses = address::list(inside, link.index)?;
    for ip in before
        .ips
        .iter()
        .filter(|ip| ip.interface.is_none_or(|i| i == index))
    {
        let there = addresses.iter().any(|message| {
            address::own(message) == Some(ip.address.ip())
                && message.header.prefix_len == ip.address.prefix()
        });
        if !there {
            return Err(differs(format!(
                "{} has lost address {}",
                link.name, ip.address
            )));
        }
    }
    Ok(())
}

/// The rules that ADD made, by which an interface's addresses find their table.
fn check_rules(inside: &mut Socket, interface: &Interface) -> Result<(), Error> {
    if interface.config.rules.is_empty() {
        return Ok(());
    }
    let there = rule::list(inside, AddressFamily::Unspec)?;
    let there: Vec<_> = there
        .iter()
        .map(|rule| (rule.header.family, display::rule(rule)))
        .collect();
    for rule in &interface.config.rules {
        let text = display::rule(rule);
        if !there.contains(&(rule.header.family, text.clone())) {
            return Err(differs(format!(
                "{} has lost the rule {text}",
                interface.name
            )));
        }
    }
    Ok(())
}

/// The routes of the result, as ADD makes messages of them, are among those out of the link.
fn check_routes(
    inside: &mut Socket,
    before: &CniResult,
    index: usize,
    link: &Link,
) -> Result<(), Error> {
    // Routes name no interface; those of other interfaces' families and gateways are theirs.
    let mut ours = before.clone();
    ours.ips
        .retain(|ip| ip.interface.is_none_or(|i| i == index));
    if before.interfaces.len() > 1 {
        ours.routes.retain(|r| {
            r.gw.is_some_and(|gw| ours.ips.iter().any(|ip| ip.address.contains(gw)))
        });
    }
    for (route, expected) in ours.routes.iter().zip(addressing::routes(&ours)) {
        let family = expected.header.address_family;
        let wanted = replay::route(&expected, 0, link.index);
        let there = route::list(inside, family, link.index)?
            .iter()
            .any(|found| {
                route::table_of(found) == route::table_of(&wanted)
                    && found.header.destination_prefix_length
                        == wanted.header.destination_prefix_length
                    && route::destination(found) == route::destination(&wanted)
                    && replay::gateway(found) == replay::gateway(&wanted)
            });
        if !there {
            return Err(differs(format!(
                "{} has lost the route to {}",
                link.name, route.dst
            )));
        }
    }
    Ok(())
}
