//! Arrays with one entry per key, for small sets of numbered keys.

/// A type with one entry per key. The key has `COUNT_MAX`, `index` and `at`.
macro_rules! per {
    ($(#[$about:meta])* $name:ident by $key:ident) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
        pub struct $name<T>([T; $key::COUNT_MAX]);

        impl<T> $name<T> {
            /// Computes the entry of each key.
            pub fn from_fn(mut entry: impl FnMut($key) -> T) -> $name<T> {
                $name(std::array::from_fn(|index| entry($key::at(index))))
            }

            /// Like `from_fn`, with a function that may fail.
            ///
            /// # Errors
            /// The first error.
            pub fn try_from_fn<E>(
                mut entry: impl FnMut($key) -> Result<T, E>,
            ) -> Result<$name<T>, E> {
                let all = (0..$key::COUNT_MAX).map(|index| entry($key::at(index)));
                let all: Vec<T> = all.collect::<Result<_, _>>()?;
                Ok($name(all.try_into().unwrap_or_else(|_| unreachable!("one of each"))))
            }

            /// All entries with their keys, in order.
            pub fn iter(&self) -> impl Iterator<Item = ($key, &T)> {
                self.0.iter().enumerate().map(|(index, entry)| ($key::at(index), entry))
            }

            /// All entries with their keys, mutable.
            pub fn iter_mut(&mut self) -> impl Iterator<Item = ($key, &mut T)> {
                self.0.iter_mut().enumerate().map(|(index, entry)| ($key::at(index), entry))
            }

            /// Applies a function to each entry.
            pub fn map<U>(self, each: impl FnMut(T) -> U) -> $name<U> {
                $name(self.0.map(each))
            }
        }

        impl<T: Copy> $name<T> {
            /// The same entry for every key.
            pub const fn of_each(entry: T) -> $name<T> {
                $name([entry; $key::COUNT_MAX])
            }

            /// Replaces one entry.
            #[must_use]
            pub fn with(mut self, key: $key, entry: T) -> $name<T> {
                self[key] = entry;
                self
            }
        }

        impl<T> std::ops::Index<$key> for $name<T> {
            type Output = T;

            fn index(&self, key: $key) -> &T {
                &self.0[key.index()]
            }
        }

        impl<T> std::ops::IndexMut<$key> for $name<T> {
            fn index_mut(&mut self, key: $key) -> &mut T {
                &mut self.0[key.index()]
            }
        }
    };
}

pub(crate) use per;
