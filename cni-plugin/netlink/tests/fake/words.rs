//! Requests in words, as ip(8) has them.

use super::*;

impl State {
    /// A request as ip(8) would say it.
    pub(super) fn words(&self, asked: &Object, flags: u16) -> String {
        let (_, new, noun) = family(asked.kind);
        let verb = match asked.kind {
            _ if flags & NLM_F_DUMP == NLM_F_DUMP => "list",
            RDMA_CHARDEV => "get",
            RDMA_SET => "set",
            NEWLINK if flags & NLM_F_CREATE == 0 => "set",
            kind => ["add", "delete", "get", "set"][usize::from(kind & 3)],
        };
        let mut words = format!("{}: {noun} {verb}", asked.namespace);
        let mut say = |word: &str| {
            words.push(' ');
            words.push_str(word.trim());
        };
        if let Some(index) = asked.index_at().map(|at| word(&asked.header, at))
            && index != 0
        {
            say(&format!("dev {index}"));
        }
        if new == NEWLINK {
            let (set, mask) = (word(&asked.header, 8), word(&asked.header, 12));
            let names = [(1, "up", "down"), (0x80, "arp off", "arp on")];
            for (flag, on, off) in names.iter().filter(|(flag, _, _)| mask & flag != 0) {
                say(if set & flag != 0 { on } else { off });
            }
            if mask & !0x81 != 0 {
                say(&format!("flags {:#x}/{:#x}", set & !0x81, mask & !0x81));
            }
        }
        for (kind, value) in &asked.attributes {
            say(&self.attribute_words(asked, *kind, value));
        }
        words.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    fn attribute_words(&self, asked: &Object, kind: u16, value: &[u8]) -> String {
        let mut alone = asked.clone();
        alone.attributes = vec![(kind, value.to_vec())];
        let payload = alone.payload();
        let header = asked.header.len();
        let (source, destination) = (asked.header.get(2), asked.header.get(1));
        let with_length = |ip: &dyn std::fmt::Debug, length: Option<&u8>| {
            format!("{ip:?}/{}", length.copied().unwrap_or_default())
        };
        let plain = match family(asked.kind).1 {
            NEWLINK | NEWLINKPROP => match kind {
                IFLA_EXT_MASK => return String::new(),
                IFLA_IFNAME | IFLA_ALT_IFNAME => {
                    return format!("name {}", Name::of_attribute(value));
                }
                IFLA_IFALIAS => return format!("alias {}", Name::of_attribute(value)),
                IFLA_ADDRESS => return format!("address {}", MacAddress::new(value)),
                IFLA_NEW_IFINDEX => return format!("index {}", number(value).unwrap_or(0)),
                IFLA_NET_NS_FD => {
                    let descriptor = number(value).unwrap_or(0).cast_signed();
                    return format!("netns {}", self.namespaces[&descriptor]);
                }
                IFLA_PROP_LIST => {
                    let mut names = String::new();
                    attribute::each(value, |_, name| {
                        names.push_str(&Name::of_attribute(name).to_string());
                    });
                    return names;
                }
                IFLA_AF_SPEC => return inet_words(value),
                _ => parse_leniently::<LinkMessage>(&payload, header).map(|message| {
                    let words = |attribute: &LinkAttribute| match attribute {
                        LinkAttribute::LinkInfo(infos) => infos.iter().map(info_words).collect(),
                        other => plain_words(other),
                    };
                    message.attributes.iter().map(words).collect::<String>()
                }),
            },
            NEWADDR => parse_leniently::<AddressMessage>(&payload, header).map(|message| {
                let words = |attribute: &_| match attribute {
                    netlink_packet_route::address::AddressAttribute::Local(ip) => {
                        with_length(ip as &IpAddr, destination)
                    }
                    other => plain_words(other),
                };
                message.attributes.iter().map(words).collect()
            }),
            NEWROUTE => parse_leniently::<RouteMessage>(&payload, header).map(|message| {
                let words = |attribute: &_| match attribute {
                    netlink_packet_route::route::RouteAttribute::Destination(to) => {
                        plain_words(&with_length(to, destination))
                    }
                    other => plain_words(other),
                };
                message.attributes.iter().map(words).collect()
            }),
            NEWRULE => parse_leniently::<RuleMessage>(&payload, header).map(|message| {
                let words = |attribute: &_| match attribute {
                    netlink_packet_route::rule::RuleAttribute::Source(from) => {
                        format!("from {}", with_length(from, source))
                    }
                    netlink_packet_route::rule::RuleAttribute::Destination(to) => {
                        format!("to {}", with_length(to, destination))
                    }
                    other => plain_words(other),
                };
                message.attributes.iter().map(words).collect()
            }),
            NEWNEIGH => parse_leniently::<NeighbourMessage>(&payload, header)
                .map(|message| message.attributes.iter().map(plain_words).collect()),
            RDMA_DEVICE | RDMA_CHARDEV => {
                return match kind {
                    1 => format!("index {}", number(value).unwrap_or(0)),
                    2 => format!("name {}", Name::of_attribute(value)),
                    68 => {
                        let descriptor = number(value).unwrap_or(0).cast_signed();
                        format!("netns {}", self.namespaces[&descriptor])
                    }
                    _ => String::new(),
                };
            }
            NEWNSID => {
                let other = number(value).and_then(|fd| self.namespaces.get(&fd.cast_signed()));
                return other.filter(|_| kind == 3).cloned().unwrap_or_default();
            }
            _ => Ok(String::new()),
        };
        plain.unwrap_or_default()
    }
}

/// `Mode(Bridge)` is `mode bridge`.
fn plain_words(attribute: &impl std::fmt::Debug) -> String {
    let text = format!("{attribute:?} ").to_lowercase();
    text.replace(['(', '[', '{'], " ")
        .replace([')', ']', '}', '"', ','], "")
}

fn info_words(info: &LinkInfo) -> String {
    match info {
        LinkInfo::Kind(kind) => format!("type {kind} "),
        // Without the kind, which stands there once more.
        LinkInfo::Data(data) => match plain_words(data).split_once(' ') {
            Some((_, words)) => words.to_owned(),
            None => String::new(),
        },
        other => plain_words(other),
    }
}

/// Settings by their numbers: `inet 22=1 inet6 8=1`.
fn inet_words(value: &[u8]) -> String {
    let mut words = String::new();
    attribute::each(value, |family, settings| {
        let name = if family == 2 { "inet" } else { "inet6" };
        attribute::each(settings, |kind, value| match family {
            2 => attribute::each(value, |kind, value| {
                words.push_str(&format!("{name} {kind}={} ", number(value).unwrap_or(0)));
            }),
            _ => words.push_str(&format!("{name} {kind}={} ", number(value).unwrap_or(0))),
        });
    });
    words
}
