//! Enums each of whose variants is one word in a configuration.

/// Declares an enum with `ALL` of its variants, the word of each, and the way back, from one table.
#[macro_export]
macro_rules! words {
    (
        $(#[$about:meta])*
        $visible:vis enum $name:ident {
            $($(#[$about_variant:meta])* $variant:ident = $word:literal,)+
        }
    ) => {
        $(#[$about])*
        #[derive(::serde::Deserialize, ::serde::Serialize)]
        $visible enum $name {
            $($(#[$about_variant])* #[serde(rename = $word)] $variant,)+
        }

        impl $name {
            /// All of them, in the order of their declaration.
            $visible const ALL: [$name; [$($word),+].len()] = [$($name::$variant),+];

            /// As written in a configuration.
            $visible const fn as_str(self) -> &'static str {
                match self {
                    $($name::$variant => $word,)+
                }
            }

            /// What a word means.
            $visible fn from_word(word: &str) -> Option<$name> {
                $name::ALL.into_iter().find(|known| known.as_str() == word)
            }
        }

        impl ::std::fmt::Display for $name {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}
