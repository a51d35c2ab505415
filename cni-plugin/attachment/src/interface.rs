//! How an interface is set up in its pod. Decided whole before the interface exists, kept in the
//! journal, applied in one go.

use std::{borrow::Cow, fmt, path::Path, thread, time::Duration, time::Instant};

use netlink::{
    Name, Socket, address, announce,
    link::{self, By, Change, InetSettings, Link},
    neighbour, route, rule,
    socket::on_errno,
    sysctl,
};
use netlink_packet_route::{
    address::AddressMessage, neighbour::NeighbourMessage, route::RouteMessage, rule::RuleMessage,
};
use serde::{Deserialize, Serialize};

use self::messages::Text;
use crate::netdev::replay;

/// How long an IPoIB link can take to have a carrier: the subnet manager is asked for the broadcast
/// group of its partition first.
pub const IPOIB_CARRIER_TIMEOUT: Duration = Duration::from_secs(5);

/// What an interface gets once it is in the pod. In messages, index 0 stands for its index.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct InterfaceConfig {
    /// Written before the interface comes up.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sysctls: Vec<Sysctl>,
    #[serde(with = "messages", skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<AddressMessage>,
    /// Permanent ones.
    #[serde(with = "messages", skip_serializing_if = "Vec::is_empty")]
    pub neighbours: Vec<NeighbourMessage>,
    /// Those first through which others reach their next hop.
    #[serde(with = "messages", skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<RouteMessage>,
    #[serde(with = "messages", skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<RuleMessage>,
}

/// A setting below `/proc/sys/net`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sysctl {
    /// Without the interface's name: `ipv4/conf/arp_notify`.
    pub key: Cow<'static, str>,
    pub value: Cow<'static, str>,
}

impl Sysctl {
    pub const fn new(key: &'static str, value: &'static str) -> Self {
        Sysctl {
            key: Cow::Borrowed(key),
            value: Cow::Borrowed(value),
        }
    }

    /// The directory that has one for each interface, and the file in it.
    pub(crate) fn group_and_file(&self) -> (&str, &str) {
        self.key.rsplit_once('/').unwrap_or(("", &self.key))
    }
}

impl InterfaceConfig {
    /// Sets the interface up and returns it as it is then. Call from within the pod's namespace.
    ///
    /// With `arp_notify` and `ndisc_notify` the kernel announces the addresses of a link that goes up
    /// with a carrier (`inetdev_event()`, `addrconf_dad_completed()`); for others see
    /// [`InterfaceConfig::announce`].
    pub fn apply(&self, socket: &mut Socket, proc: &Path, link: &Link) -> netlink::Result<Link> {
        let (index, name) = (link.index, &link.name);
        let mut carried = InetSettings::default();
        let all = self
            .sysctls
            .iter()
            .map(|one| (one.group_and_file(), &one.value));
        let mut files: Vec<_> = (all.clone())
            .filter(|((group, file), value)| !carried.add(group, file, value))
            .collect();
        let what = format_args!("set how {name} answers for addresses and makes them");
        if !link::set_inet(socket, what, index, &carried)? {
            files = all.collect();
        }
        for ((group, file), value) in files {
            // A kernel may not have the setting.
            let written = sysctl::write(proc, group, name, file, value);
            on_errno(written, &[libc::ENOENT], ())?;
        }
        for message in &self.addresses {
            let mut message = message.clone();
            message.header.index = index;
            let what = format!("add address {} to {name}", message.text());
            address::add(socket, &what, &message)?;
        }
        link::change(socket, format_args!("set {name} up"), index, &Change::up())?;
        for done in self.connect(socket, "add", index, name) {
            done?;
        }
        let now = link::get(socket, By::Index(index))?;
        Ok(now.unwrap_or_else(|| link.clone()))
    }

    /// Writes neighbours, routes and rules of the link with this index. One that is refused does not stop
    /// the others.
    pub(crate) fn connect(
        &self,
        socket: &mut Socket,
        verb: &str,
        index: u32,
        name: &Name,
    ) -> Vec<netlink::Result<()>> {
        let mut done = Vec::new();
        for message in &self.neighbours {
            let what = format!("{verb} neighbour {} of {name}", message.text());
            let neighbour = replay::neighbour(message, index);
            done.push(neighbour::replace(socket, &what, &neighbour));
        }
        for message in &self.routes {
            let what = format!("{verb} route {} of {name}", message.text());
            let route = replay::route(message, 0, index);
            done.push(route::append(socket, &what, &route));
        }
        for message in &self.rules {
            let what = format!("{verb} rule {} of {name}", message.text());
            done.push(rule::add(socket, &what, message));
        }
        done
    }

    /// Announces the addresses of a link that came up without a carrier, if it has one by now. Returns
    /// whether neighbours were told. Without a carrier the kernel drops what is sent, and when it comes,
    /// neither `arp_notify` nor `ndisc_notify` sends anything for an address that is not tentative
    /// (`addrconf_dad_run()`).
    ///
    /// IPoIB waits for its carrier until `deadline` and is announced in any case: neighbours know its
    /// address by its queue pair, which is new. Call from within the pod's namespace; `link` is read
    /// anew.
    pub fn announce(
        &self,
        socket: &mut Socket,
        link: &mut Link,
        deadline: Instant,
    ) -> netlink::Result<bool> {
        if self.addresses.is_empty() || link.carrier && !link.is_infiniband() {
            return Ok(true);
        }
        loop {
            if let Some(now) = link::get(socket, By::Index(link.index))? {
                *link = now;
            }
            if link.carrier || !link.is_infiniband() || Instant::now() >= deadline {
                break;
            }
            thread::sleep(Duration::from_millis(5));
        }
        if link.carrier {
            // Closing a packet socket waits for all processors (`packet_release()`), some 10 ms.
            announce::announce(link, self.addresses.iter().filter_map(address::own))?;
        }
        Ok(link.carrier)
    }
}

impl fmt::Display for InterfaceConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Sysctl { key, value } in &self.sysctls {
            write!(f, "; {key}={value}")?;
        }
        let addresses = self.addresses.iter().map(|one| ("address", one.text()));
        let neighbours = self.neighbours.iter().map(|one| ("neighbour", one.text()));
        let routes = self.routes.iter().map(|one| ("route", one.text()));
        let rules = self.rules.iter().map(|one| ("rule", one.text()));
        for (what, text) in addresses.chain(neighbours).chain(routes).chain(rules) {
            write!(f, "; {what} {text}")?;
        }
        Ok(())
    }
}

/// Kernel messages, each with its text for the person who reads the journal. Attributes that this program
/// does not know are in it, too.
pub(crate) mod messages {
    use netlink_packet_core::{Emitable, Parseable};
    use netlink_packet_route::{
        address::AddressMessage, neighbour::NeighbourMessage, route::RouteMessage,
        rule::RuleMessage,
    };
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

    use crate::netdev::display;

    /// A kernel message and what it says.
    #[derive(Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Message {
        text: String,
        /// The message's bytes in hexadecimal.
        message: String,
    }

    pub(super) trait Text {
        fn text(&self) -> String;
    }

    macro_rules! text {
        ($($message:ty: $text:path),*) => {
            $(impl Text for $message {
                fn text(&self) -> String {
                    $text(self)
                }
            })*
        };
    }
    text!(
        AddressMessage: display::address,
        NeighbourMessage: display::neighbour,
        RouteMessage: display::route,
        RuleMessage: display::rule
    );

    pub(super) fn serialize<T: Emitable + Text, S: Serializer>(
        messages: &[T],
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_seq(messages.iter().map(|one| {
            let mut bytes = vec![0; one.buffer_len()];
            one.emit(&mut bytes);
            Message {
                text: one.text(),
                message: hexadecimal(&bytes),
            }
        }))
    }

    pub(super) fn deserialize<'de, T: Parseable<[u8]>, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Vec<T>, D::Error> {
        let messages = Vec::<Message>::deserialize(from)?.into_iter();
        let parsed = messages.map(|one| {
            let bytes = of_hexadecimal(&one.message);
            let bytes = bytes.ok_or_else(|| D::Error::custom("message is not hexadecimal"))?;
            T::parse(&bytes).map_err(D::Error::custom)
        });
        parsed.collect()
    }

    pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
        use std::fmt::Write;
        let mut text = String::with_capacity(bytes.len() * 2);
        for byte in bytes {
            // Writing to a String does not fail.
            let _ = write!(text, "{byte:02x}");
        }
        text
    }

    fn of_hexadecimal(text: &str) -> Option<Vec<u8>> {
        let digits = text.as_bytes().chunks(2);
        let byte = |pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        digits.map(byte).collect()
    }
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::{
        AddressFamily,
        address::{AddressAttribute, AddressFlags},
        neighbour::{NeighbourAddress, NeighbourAttribute},
        route::{RouteAddress, RouteAttribute, RouteFlags, RouteMetric, RouteVia},
        rule::RuleAttribute,
    };
    use serde_json::json;

    use super::*;

    fn config() -> InterfaceConfig {
        let mut address = AddressMessage::default();
        address.header.family = AddressFamily::Inet6;
        address.header.prefix_len = 64;
        address.attributes = vec![
            AddressAttribute::Address("fd00::5".parse().unwrap()),
            AddressAttribute::Flags(AddressFlags::Nodad),
        ];
        let mut neighbour = NeighbourMessage::default();
        neighbour.header.family = AddressFamily::Inet;
        neighbour.attributes = vec![
            NeighbourAttribute::Destination(NeighbourAddress::Inet([10, 0, 0, 2].into())),
            NeighbourAttribute::LinkLayerAddress(vec![2, 0, 0, 0, 0, 2]),
        ];
        let mut route = RouteMessage::default();
        route.header.address_family = AddressFamily::Inet;
        route.header.destination_prefix_length = 8;
        route.header.flags = RouteFlags::Onlink;
        route.attributes = vec![
            RouteAttribute::Destination(RouteAddress::Inet([10, 0, 0, 0].into())),
            RouteAttribute::Oif(0),
            RouteAttribute::Table(1 << 24),
            RouteAttribute::Metrics(vec![RouteMetric::Mtu(4200)]),
            RouteAttribute::Via(RouteVia::Inet6("fe80::1".parse().unwrap())),
        ];
        let mut rule = RuleMessage::default();
        rule.header.family = AddressFamily::Inet;
        rule.header.src_len = 32;
        rule.attributes = vec![
            RuleAttribute::Source("10.0.0.5".parse().unwrap()),
            RuleAttribute::Table(1 << 24),
            RuleAttribute::Priority(1000),
        ];
        InterfaceConfig {
            sysctls: vec![Sysctl::new("ipv4/conf/arp_notify", "1")],
            addresses: vec![address],
            neighbours: vec![neighbour],
            routes: vec![route],
            rules: vec![rule],
        }
    }

    #[test]
    fn the_journal_shows_and_keeps_each_message() {
        let written = serde_json::to_value(config()).unwrap();
        let read: InterfaceConfig = serde_json::from_value(written.clone()).unwrap();
        assert_eq!(read, config());
        assert_eq!(
            written["sysctls"],
            json!([{"key": "ipv4/conf/arp_notify", "value": "1"}])
        );
        for (key, text) in [
            ("addresses", "fd00::5/64"),
            ("neighbours", "10.0.0.2 at 02:00:00:00:00:02"),
            ("routes", "10.0.0.0/8 via fe80::1 table 16777216"),
            ("rules", "1000: from 10.0.0.5/32 lookup 16777216"),
        ] {
            assert_eq!(written[key][0]["text"], text);
        }
        let empty = serde_json::to_value(InterfaceConfig::default()).unwrap();
        assert_eq!(empty, json!({}));
        assert!(serde_json::from_value::<InterfaceConfig>(json!({"adresses": []})).is_err());
        let damaged = json!({"rules": [{"text": "", "message": "zz"}]});
        assert!(serde_json::from_value::<InterfaceConfig>(damaged).is_err());
    }

    #[test]
    fn an_interface_is_shown_as_people_write_it() {
        assert_eq!(
            config().to_string(),
            "; ipv4/conf/arp_notify=1; address fd00::5/64; neighbour 10.0.0.2 at 02:00:00:00:00:02; \
             route 10.0.0.0/8 via fe80::1 table 16777216; rule 1000: from 10.0.0.5/32 lookup 16777216"
        );
    }
}
