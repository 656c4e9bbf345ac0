"""`python -m jaxacct.site` builds the site."""

import sys

from jaxacct.site.build import main

if __name__ == "__main__":
    sys.exit(main())
