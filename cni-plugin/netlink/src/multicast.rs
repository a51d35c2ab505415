//! Static multicast addresses of the link layer (`ip maddr add`), which a change of namespaces
//! flushes (`dev_mc_flush()`). Addresses that protocols join come again with them.

use std::{fs, path::Path};

use hca::MacAddress;

use super::{Error, Result, link::Link};

/// A static multicast address of a link of the namespace this process is in; none where it has none.
pub fn first_static(proc: &Path, link: &Link) -> Result<Option<MacAddress>> {
    let path = proc.join("thread-self/net/dev_mcast");
    match fs::read(&path) {
        Ok(table) => Ok(of_table(&String::from_utf8_lossy(&table), link.index)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::call(format_args!("read {}", path.display()), e)),
    }
}

/// Index, name, users, whether it is static, address (`dev_mc_seq_show()`). A name has no white
/// space in it.
fn of_table(table: &str, index: u32) -> Option<MacAddress> {
    let of_line = |line: &str| {
        let mut fields = line.split_whitespace();
        let of_link = fields.next()?.parse() == Ok(index);
        let is_static = fields.nth(2)?.parse() != Ok(0);
        let digits = fields.next().filter(|_| of_link && is_static)?.as_bytes();
        let pairs = digits
            .chunks(2)
            .filter_map(|pair| std::str::from_utf8(pair).ok());
        let bytes: Option<Vec<u8>> = pairs
            .map(|pair| u8::from_str_radix(pair, 16).ok())
            .collect();
        bytes.map(MacAddress::new)
    };
    table.lines().find_map(of_line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn static_addresses_of_a_link_are_distinguished_from_those_of_protocols() {
        // Captured on 6.18.
        let table = "2    eth0            1     0     01005e000001\n\
                     3    nic0            1     1     333300000099\n\
                     3    nic0            1     0     333300000001\n";
        let found = of_table(table, 3).map(|address| address.to_string());
        assert_eq!(found.as_deref(), Some("33:33:00:00:00:99"));
        assert_eq!(of_table(table, 2), None);
        assert_eq!(of_table("rubbish", 2), None);
    }
}
