// Example texts, written for this page.

export const EXAMPLES = {
  english: `A library is a collection of books, and possibly other materials and media, that is accessible for use by its members. A lighthouse, in contrast, is a tower that shines a bright lamp over the sea at night, so that ships can find their way into the harbor and keep clear of the rocks. Both were built by cities which lived from trade: the first one kept what was known, the second one kept those alive who went out to learn more.`,
  chinese: `图书馆收藏书籍和其他资料，供读者查阅和借阅。灯塔则是建在海岸或礁石上的高塔，夜间发出强光，为船只指引航向，使它们避开危险的暗礁，安全驶入港口。古代的商业城市往往两者兼备：前者保存已有的知识，后者守护远航求知的人。`,
  code: `import argparse
import json


def read_records(path, encoding="utf-8"):
    """Yield one object for each line of a JSON Lines file."""
    with open(path, encoding=encoding) as file:
        for number, line in enumerate(file, start=1):
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: {error}") from error


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="the file to read")
`,
};
