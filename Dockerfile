# The command line as an image, which the dashboard of many runs in. From the root of the repository: make dashboard-image, or
#
#   docker build -t REGISTRY/elasticctl-dashboard:VERSION .
#
# BASE is any image with Python 3.11 or newer, and venv.
ARG BASE=python:3.12-slim
FROM ${BASE} AS build

RUN python3 -m venv /opt/elasticctl
ENV PATH=/opt/elasticctl/bin:$PATH
COPY requirements.lock /tmp/
RUN pip install --no-cache-dir --require-hashes -r /tmp/requirements.lock
COPY . /src
RUN pip install --no-cache-dir --no-deps /src && pip uninstall --yes pip setuptools

FROM ${BASE}

COPY --from=build /opt/elasticctl /opt/elasticctl
# As the Deployment runs it: an unknown user, and nothing to write to but /tmp.
ENV PATH=/opt/elasticctl/bin:$PATH PYTHONDONTWRITEBYTECODE=1 ELASTICCTL_HOME=/tmp
USER 65532:65532
ENTRYPOINT ["elasticctl"]
